"""The parts that modules with tuned convolutions share: the choices, and when an operator can take an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from mucudnn.running.choices import Choices
from mucudnn.running.filter_cache import FilterCache
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ITEM_BYTES, ConvProblem
from mucudnn.words.results import Configuration

_DTYPES = frozenset(getattr(torch, name) for name in ITEM_BYTES)


class TunedOperation(Protocol):
    """Choice for one operation of a module; ``str`` tells why. Tuning makes it."""

    @property
    def problem(self) -> ConvProblem: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def configuration(self) -> Configuration: ...


class TunedClass:
    """The part of a module of ours that is not torch's class, from which it derives too."""

    @property
    def untuned_class(self) -> type:
        """The class that ``optimize`` found: assigned to ``__class__``, it makes the module torch's own again.

        It is the module's own class where somebody else has made that of ours since.
        """
        own: type = vars(type(self)).get("_untuned_class", type(self))
        return own

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which cannot compile this module, and would put an answer in its place."""
        name = next(base.__name__ for base in type(self).__mro__ if base.__module__.startswith("mucudnn."))
        raise InvalidInputError(
            f"torch.jit.script cannot compile mucudnn.{name}: use torch.compile, torch.export or torch.jit.trace, or "
            "make each such module torch's own again, module.__class__ = module.untuned_class, and script the model "
            "then"
        )


class TunedModule(TunedClass):
    """A convolution that runs what was chosen for it.

    tuned: the choice for each operation, as reported. choices: what runs; ``None``: torch's own, for every input.
    confirmation: the comparison of whole steps, or None; then unconfirmed says why there was none. filter_cache: see
    ``Conv2d``, which alone has one.
    """

    tuned: tuple[TunedOperation, ...] = ()
    choices: Choices | None = None
    confirmation: object | None = None
    unconfirmed: str | None = None
    filter_cache: FilterCache | None = None


def operator_takes(x: Tensor, dims: tuple[int, int]) -> bool:
    """Tell whether x is dense images of real numbers. Weight and bias the operator looks at itself.

    dims: how many dimensions x has for one sample and for a batch. The operators have no forward-mode derivative, no
    rules for ``torch.func`` and no complex arithmetic. A ``torch.fx.Proxy``, for one, is no tensor.
    """
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.dim() not in dims:
        return False
    if x.is_nested or x.layout is not torch.strided or x.is_meta:
        return False
    if torch.compiler.is_compiling():
        return True
    return forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


def padded(module: _ConvNd, x: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
    """Pad x where a module's padding is not zeros on both sides alike. Returns the padding that is left."""
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
    """Tell whether the operator is to be called. In a graph it is for all sizes: it looks them up when it runs.

    x_shape: (N, C, H, W) of the problem.
    """
    if torch.compiler.is_compiling():
        return True
    try:
        return x_shape in choices.x_shapes
    except TypeError:  # symbolic sizes cannot be hashed
        return True


def are_pairs(stride: Any, padding: Any, dilation: Any) -> bool:
    """Tell in every call what ``are_tuples`` tells, in less time."""
    if type(stride) is type(padding) is type(dilation) is tuple:
        return len(stride) == len(padding) == len(dilation) == 2
    return False


def are_tuples(*geometry: Any, length: int) -> bool:
    """Tell whether they are as torch's modules make them; by hand they may be set to other things."""
    return all(type(one) is tuple and len(one) == length for one in geometry)
