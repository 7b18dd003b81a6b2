"""``BandedModel``, a model that runs in bands of rows within a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from mucudnn.graph.schedule import Schedule
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.warning import say_once

Signature = tuple[object, ...]
_State: TypeAlias = tuple[list[Tensor | None], list[int], list[int]]


class BandedModel(nn.Module):
    """A model in ``eval()`` that runs as a graph; with a memory budget, each call stays within its bytes.

    The bytes are beside parameters, arguments and results. It computes what ``model`` computes, for inputs of the
    shapes and dtypes that it was tuned for. For others, where gradients are recorded, under autocast, and after one of
    its parameters or buffers has changed, ``model`` itself runs, and this is said once. schedules: by signature of the
    arguments; None where ``model`` itself is faster and within the bytes. findings: what was chosen and why, for
    ``report``.
    """

    def __init__(
        self, model: nn.Module, schedules: Mapping[Signature, Schedule | None], findings: Sequence[Any] = ()
    ) -> None:
        super().__init__()
        self.model = model
        self.schedules, self.findings = dict(schedules), tuple(findings)
        owned = (of for module in model.modules() for of in (module._parameters, module._buffers))
        self._places = [(of, name) for of in owned for name in of]
        self._counts_writes = not any(one.is_inference() for one in chain(model.parameters(), model.buffers()))
        self._tuned_for: _State | None = self._state()
        self.training = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *arguments: Any, **named: Any) -> Any:
        signature = signature_of(arguments)
        schedule = None if named else self.schedules.get(signature)
        if schedule is None and not named and signature in self.schedules:
            return self.model(*arguments)
        why = self._why_not(schedule, arguments)
        if schedule is None or why is not None:
            say_once(f"{type(self.model).__name__} runs as it was, not as a tuned graph: {why}")
            return self.model(*arguments, **named)
        with torch.no_grad():
            return schedule.run(arguments)

    def train(self, mode: bool = True) -> Self:
        """Switch to ``eval()`` mode; raise ``InvalidInputError`` otherwise."""
        if mode:
            raise InvalidInputError(
                "a model that runs as a graph is for inference only: train the model that was given to "
                "mucudnn.optimize, which is the attribute 'model'"
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        return "\n".join(str(one) for one in self.findings)

    def _why_not(self, schedule: Schedule | None, arguments: Sequence[Any]) -> str | None:
        if schedule is None:
            shapes = [tuple(one.shape) for one in tree_flatten(arguments)[0] if isinstance(one, Tensor)]
            return f"it was not tuned for these arguments, of shapes {shapes}; give optimize a sample of each shape"
        if torch.is_grad_enabled() and self._records(arguments):
            return "gradients are recorded; call it in torch.no_grad()"
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            return "it runs under autocast"
        if self._has_changed():
            return "a parameter or a buffer has changed; optimize it again"
        return None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tuned_for": None if self._has_changed() else ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._tuned_for is not None:  # a copy has other addresses
            self._tuned_for = self._state()

    def _records(self, arguments: Sequence[Any]) -> bool:
        leaves = chain(tree_flatten(arguments)[0], self.model.parameters())
        return any(isinstance(one, Tensor) and one.requires_grad for one in leaves)

    def _state(self) -> _State:
        """Return the model's parameters and buffers, numbers that change when torch writes to them, and addresses."""
        tensors = [of.get(name) for of, name in self._places]
        there = [one for one in tensors if one is not None]
        written = [one._version for one in there] if self._counts_writes else []
        return tensors, written, [one.data_ptr() for one in there]

    def _has_changed(self) -> bool:
        if self._tuned_for is None:
            return True
        (tensors, *numbers), (current, *current_numbers) = self._tuned_for, self._state()
        return numbers != current_numbers or not all(map(is_, tensors, current))


def signature_of(arguments: Sequence[Any]) -> Signature:
    """Return what the arguments of two calls must have in common to be run by the same schedule."""
    leaves, spec = tree_flatten(tuple(arguments))
    return (str(spec), *(_described(leaf) for leaf in leaves))


def _described(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.layout
    return type(leaf), repr(leaf)
