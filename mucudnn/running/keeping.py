"""Models of which a forward pass keeps what was chosen, and has the rest computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mucudnn.core.errors import InvalidInputError
from mucudnn.running import tape
from mucudnn.running.modules import TunedModule, derived_tuned, require_free_names
from mucudnn.running.segments import SegmentedModule

_autograd: Any = torch._C._autograd  # of which stubs know less


class KeepingModule(SegmentedModule):
    """A model of which a forward pass keeps what was chosen, so that a training step stays within a budget.

    keeping: the choices; None to keep all that PyTorch keeps.
    is_as_chosen: whether the last forward pass that recorded a tape had the values that were chosen for.
    """

    keeping: Any = None
    is_as_chosen: bool = True

    def forward(self, *arguments: Any, **named: Any) -> Any:
        keeping = self.keeping
        if keeping is None or not (keeping.choices or keeping.segments) or not records(self):
            return super().forward(*arguments, **named)
        trained = [parameter for parameter in self.parameters() if parameter._post_accumulate_grad_hooks]
        with tape.Tape(keeping.choices, trained) as recorded:
            result = super().forward(*arguments, **named)
        vars(self)["is_as_chosen"] = recorded.matches and recorded.count == len(keeping.choices)
        free_concatenations(result, (arguments, named))
        return result


def free_concatenations(results: Any, inputs: Any) -> None:
    """Have the backward pass from the results to the inputs free the gradient of a concatenation once it is read.

    The gradients of the tensors that were concatenated are views of it. All are copied but that of the tensor which was
    computed last, since autograd reads it next; the others may have to wait for a long time, as in a U-Net. Small
    ones stay views: some of PyTorch's operators round otherwise for a copy.
    """
    known = {x.grad_fn for x in tree_leaves(inputs) if isinstance(x, Tensor)}
    left = [y.grad_fn for y in tree_leaves(results) if isinstance(y, Tensor)]
    while left:
        node = left.pop()
        if node is None or node in known:
            continue
        known.add(node)
        following = [function for function, _ in node.next_functions]
        left += following
        if node.name() == "CatBackward0":
            numbers = [-1 if function is None else function._sequence_nr() for function in following]
            node.register_hook(partial(_copied, numbers.index(max(numbers))))


def _copied(first: int, gradients: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
    copied = list(gradients)
    for place, dx in enumerate(gradients):
        if dx is not None and place != first and dx.untyped_storage().nbytes() >= tape.LEAST_BYTES:
            copied[place] = dx.clone()
    return tuple(copied)


def records(model: nn.Module) -> bool:
    """Return whether a forward pass of a model may record a tape.

    It trains, and nothing else decides what autograd keeps, such as a checkpoint around the model.
    """
    if not model.training or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    takes_hooks = torch.is_grad_enabled() and _autograd._saved_tensors_hooks_is_enabled()
    has_none = takes_hooks and _autograd._top_saved_tensors_default_hooks(True) is None
    return has_none and not torch._C._are_functorch_transforms_active()


def make_keeping(model: nn.Module) -> KeepingModule:
    """Let a model keep what is chosen. Raises ``InvalidInputError`` if its class cannot be changed."""
    if isinstance(model, TunedModule) and not isinstance(model, SegmentedModule):
        raise InvalidInputError(f"{type(model).__name__} is a single layer; memory_budget is for models of several")
    if not isinstance(model, KeepingModule):
        if not isinstance(model, SegmentedModule):
            require_free_names(model)
        object.__setattr__(model, "__class__", derived_tuned(KeepingModule, type(model)))
    return cast(KeepingModule, model)
