"""Common parts of tuned convolution modules: their choices, and checks of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ITEM_BYTES, ConvProblem
from mucudnn.core.records import Configuration
from mucudnn.running.choices import Choices

_TORCHS: Any = Tensor.__torch_function__
_USUAL_FUNCTIONS = _TORCHS.__func__, torch._C._disabled_torch_function_impl
_DTYPES = frozenset(getattr(torch, name) for name in ITEM_BYTES)


class TunedOperation(Protocol):
    """Choice for one operation of a module, made by tuning; ``str`` includes the reason."""

    @property
    def problem(self) -> ConvProblem: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def configuration(self) -> Configuration: ...


class TunedModule:
    """A convolution module that runs its tuned choices.

    tuned: the choice for each operation, as reported. choices: the choices to run; None to run torch's convolution for
    every input. confirmation: the comparison of whole steps of the model with torch's, or None. unconfirmed: the reason
    why there was no comparison.
    """

    tuned: tuple[TunedOperation, ...] = ()
    choices: Choices | None = None
    confirmation: object | None = None
    unconfirmed: str | None = None

    @property
    def untuned_class(self) -> type:
        """The module's class before ``optimize``: assigned to ``__class__``, it makes the module torch's own again.

        If other code has since derived a new class from ours for the module, this is that class itself.
        """
        own: type = vars(type(self)).get("_untuned_class", type(self))
        return own

    def __prepare_scriptable__(self) -> NoReturn:
        """Reject ``torch.jit.script``, which calls this method and cannot compile a tuned module."""
        name = next(base.__name__ for base in type(self).__mro__ if base.__module__.startswith("mucudnn."))
        raise InvalidInputError(
            f"torch.jit.script cannot compile mucudnn.{name}: use torch.compile, torch.export or torch.jit.trace, or "
            "first make each such module PyTorch's own again with module.__class__ = module.untuned_class"
        )


@contextmanager
def running_torchs_own(modules: Iterable[TunedModule]) -> Iterator[None]:
    """Make the modules run torch's convolution inside the block."""
    before = [(module, module.choices) for module in modules]
    try:
        for module, _ in before:
            module.choices = None
        yield
    finally:
        for module, choices in before:
            module.choices = choices


def operator_takes(x: Tensor, weight: Tensor, dims: tuple[int, int]) -> bool:
    """Return whether our operators accept x: a dense, real tensor whose number of dimensions is one of ``dims``.

    Returns False under forward-mode AD and ``torch.func``, which the operators do not support, if x is not a tensor,
    for example a ``torch.fx.Proxy``, if the weight handles torch's functions itself, and under ``torch.export``,
    whose graphs are for programs without mucudnn. The operator checks weight and bias otherwise.
    """
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.dim() not in dims:
        return False
    if x.is_nested or x.layout is not torch.strided or x.is_meta:
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    if _handles_functions(weight):
        return False
    return forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


def _handles_functions(tensor: Tensor) -> bool:
    """Return whether a tensor's class has its own ``__torch_function__``."""
    function: Any = type(tensor).__torch_function__
    return getattr(function, "__func__", function) not in _USUAL_FUNCTIONS


def padded(module: _ConvNd, x: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
    """Pad x if the module's padding is not symmetric zeros; return x and the remaining padding of the convolution."""
    none = (0,) * (weight.dim() - 2)
    if module.padding_mode != "zeros":
        return F.pad(x, module._reversed_padding_repeated_twice, module.padding_mode), none
    if module.padding == "valid":
        return x, none
    if module.padding != "same":
        return x, module.padding
    totals = [dilation * (size - 1) for dilation, size in zip(module.dilation, weight.shape[2:], strict=True)]
    if any(total % 2 for total in totals):  # an even filter: the odd row and column belong to the bottom and right
        x = F.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
    return x, tuple(total // 2 for total in totals)


def may_be_tuned(choices: Choices, x_shape: Sequence[int]) -> bool:
    """Return whether to call our operator, given the tuned sizes; always True in compiled graphs.

    In a compiled graph, sizes are known only when the operator runs. x_shape: (N, C, H, W) of the problem.
    """
    if torch.compiler.is_compiling():
        return True
    try:
        return x_shape in choices.x_shapes
    except TypeError:  # symbolic sizes cannot be hashed
        return True


def are_pairs(stride: Any, padding: Any, dilation: Any) -> bool:
    """Return whether all three are tuples of length two: a faster ``are_tuples``, for use in every call."""
    if type(stride) is type(padding) is type(dilation) is tuple:
        return len(stride) == len(padding) == len(dilation) == 2
    return False


def are_tuples(*geometry: Any, length: int) -> bool:
    """Return whether all arguments are tuples of this length, as in torch's modules unless users assign other types."""
    return all(type(one) is tuple and len(one) == length for one in geometry)
