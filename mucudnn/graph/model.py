"""``BandedModel``, a model that runs in bands of rows within a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_flatten, tree_leaves

from mucudnn.core.errors import InvalidInputError, warn
from mucudnn.graph.guards import Guards
from mucudnn.graph.schedule import Schedule
from mucudnn.running.eager.hot_path import is_plain

Signature = tuple[object, ...]


class BandedModel(nn.Module):
    """A model in ``eval()`` that runs as a graph; with a memory budget, each call stays within its bytes.

    The bytes are beside parameters, arguments and results. It computes what ``model`` computes, for inputs of the
    shapes and dtypes that it was tuned for. ``model`` itself runs for others, where gradients are recorded, in modes
    that change what PyTorch's operators do, and while it is not as it was when it was tuned (``Guards``); a warning
    says why, once for each reason. schedules: by signature of the arguments; None where ``model`` itself is faster and
    within the bytes. findings: what was chosen and why, for ``report``.
    """

    def __init__(
        self, model: nn.Module, schedules: Mapping[Signature, Schedule | None], findings: Sequence[Any] = ()
    ) -> None:
        super().__init__()
        self.model = model
        self.schedules, self.findings = dict(schedules), tuple(findings)
        self._guards: Guards | None = Guards(model)
        self._said: set[str] = set()
        self.training = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *arguments: Any, **named: Any) -> Any:
        schedule, why = self._schedule_for(arguments, named)
        if schedule is not None:
            return schedule.run(arguments)
        if why is not None and why not in self._said:
            self._said.add(why)
            warn(f"{type(self.model).__name__} runs as it was, not as a tuned graph: {why}", RuntimeWarning)
        return self.model(*arguments, **named)

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

    def _schedule_for(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Schedule | None, str | None]:
        """Return what runs a call; if the model itself does although it is not faster, the reason."""
        if _is_watched():
            return None, "autocast, a mode or a transform of PyTorch is active, such as torch.func's or a tracer"
        leaves: Sequence[Any] = arguments
        if not all(isinstance(one, Tensor) for one in arguments):
            leaves = tree_leaves(arguments)
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        signature = None if named else signature_of(arguments)
        if signature not in self.schedules:
            shapes = [tuple(one.shape) for one in tensors]
            return None, (
                f"it was not tuned for these arguments, of shapes {shapes}; give optimize a sample of each shape"
            )
        schedule = self.schedules[signature]
        if schedule is None:
            return None, None
        if not all(map(is_plain, tensors)):
            return None, "an argument is of a subclass of Tensor, or a view that is negated or conjugated lazily"
        if torch.is_grad_enabled() and any(one.requires_grad for one in chain(tensors, self.model.parameters())):
            return None, "gradients are recorded; call it in torch.no_grad()"
        if any(leaves[number].stride() != of for number, of in schedule.captured.strides.items()):
            return None, "a result is a view of an argument, which has other strides than the sample"
        if self._guards is None:
            return None, "it was copied after it had changed; optimize it again"
        why = self._guards.why_not()
        return (schedule, None) if why is None else (None, f"{why}; optimize it again")

    def __getstate__(self) -> dict[str, Any]:
        is_as_noted = self._guards is not None and self._guards.why_not() is None
        return self.__dict__ | {"_guards": is_as_noted}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._guards = Guards(self.model) if self._guards else None  # a copy has other addresses


def _is_watched() -> bool:
    """Return whether something changes what PyTorch's operators do; a default device does not."""
    if torch._C._is_any_autocast_enabled() or torch._C._len_torch_dispatch_stack():
        return True
    if torch._C._are_functorch_transforms_active():
        return True
    if torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0:
        return True
    if not torch._C._len_torch_function_stack():
        return False
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode) is not DeviceContext for mode in modes)


def signature_of(arguments: tuple[Any, ...]) -> Signature:
    """Return what the arguments of two calls must have in common to be run by the same schedule."""
    if all(isinstance(one, Tensor) for one in arguments):
        return tuple(map(_leaf_signature, arguments))
    leaves, spec = tree_flatten(arguments)
    return (str(spec), *map(_leaf_signature, leaves))


def _leaf_signature(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.layout
    return type(leaf), repr(leaf)
