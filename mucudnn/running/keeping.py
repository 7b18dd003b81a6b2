"""Models of which a forward pass keeps what was chosen, and has the rest computed again in the backward pass."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from mucudnn.core.errors import InvalidInputError
from mucudnn.running import tape
from mucudnn.running.modules import TunedModule, derived_tuned, require_free_names
from mucudnn.running.segments import SegmentedModule


class KeepingModule(SegmentedModule):
    """A model of which a forward pass keeps what was chosen, so that a training step stays within a budget.

    keeping: the choices; None to keep all that PyTorch keeps.
    """

    keeping: Any = None

    def forward(self, *arguments: Any, **named: Any) -> Any:
        is_recorded = torch.is_grad_enabled() and self.training and not torch.compiler.is_compiling()
        choices = () if self.keeping is None else self.keeping.choices
        if not choices or not is_recorded or tape.recording() is not None:
            return super().forward(*arguments, **named)
        with tape.Tape(choices):
            return super().forward(*arguments, **named)


def make_keeping(model: nn.Module) -> KeepingModule:
    """Let a model keep what is chosen. Raises ``InvalidInputError`` if its class cannot be changed."""
    if isinstance(model, TunedModule) and not isinstance(model, SegmentedModule):
        raise InvalidInputError(f"{type(model).__name__} is a single layer; memory_budget is for models of several")
    if not isinstance(model, KeepingModule):
        if not isinstance(model, SegmentedModule):
            require_free_names(model)
        object.__setattr__(model, "__class__", derived_tuned(KeepingModule, type(model)))
    return cast(KeepingModule, model)
