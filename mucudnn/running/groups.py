"""Groups: a norm with the addition and the activation that follow it, as one node of autograd.

A group keeps x, the statistics of the norm, and one bit an element where something is added; PyTorch's operators also
keep what they write. Pending tensors find out which operations belong to a group (``pending``).
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from mucudnn.kernels.algorithm import Prologue
from mucudnn.kernels.compiled import normalization
from mucudnn.kernels.compiled.normalization import PIXELS, Norm
from mucudnn.running import tape
from mucudnn.running.eager.bound_norm import BoundNorm
from mucudnn.running.eager.hot_path import is_plain

_T = TypeVar("_T")


class _Notes(Generic[_T]):
    """Values noted for tensors, each until its tensor is freed or changed."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Tensor], int, _T]] = {}

    def note(self, tensor: Tensor, value: _T) -> None:
        key, notes = id(tensor), self._notes

        def forget(_: object) -> None:
            notes.pop(key, None)

        notes[key] = weakref.ref(tensor, forget), tensor._version, value

    def of(self, tensor: Tensor) -> _T | None:
        noted = self._notes.get(id(tensor))
        return noted[2] if noted is not None and noted[0]() is tensor and noted[1] == tensor._version else None


_moments: _Notes[Tensor] = _Notes()  # of results of convolutions
_sources: _Notes[object] | None = None


@dataclass(frozen=True, slots=True)
class GroupCall:
    """What the time of a group depends on.

    norm: with the activation.
    strides: of x.
    weight_dtype: None without weight and bias.
    """

    norm: Norm
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    has_addition: bool
    is_fixed: bool

    def __str__(self) -> str:
        sets, function = self.norm.sets, self.norm.function
        kinds = {0: "batch norm", PIXELS: "layer norm", self.shape[1]: "instance norm"}
        kind = kinds.get(sets, f"group norm of {sets}") + (", frozen" if self.is_fixed else "")
        return " + ".join([kind, *["addition"] * self.has_addition, *([] if function is None else [function])])


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of a group in a forward pass.

    added: refers to what was added, with its version then.
    """

    storage: StorageWeakRef
    added: weakref.ref[Tensor] | None
    version: int

    @classmethod
    def of(cls, y: Tensor, added: Tensor | None) -> _Result:
        storage = StorageWeakRef(y.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(storage, None, 0) if added is None else cls(storage, weakref.ref(added), added._version)

    def is_dropped(self) -> bool:
        """Return whether nothing keeps the result, and what was added has not been changed since."""
        added = None if self.added is None else self.added()
        return self.storage.expired() and (added is None or added._version == self.version)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class GroupChoices:
    """What is computed together with a norm.

    defers: whether the norm returns pending tensors, since activations or additions take them.
    joins_additions: whether additions return pending tensors, since activations take them.
    computes_again: whether convolutions of the results have them computed again in the backward pass, since nothing
        else keeps them.
    defers_activations: whether activations return pending tensors, since convolutions normalize and activate what they
        read.
    is_returned: whether the model has returned a pending tensor.
    is_counting: whether calls are being counted, from which ``settle`` makes the choices.
    calls: the number of calls of each kind in a step.
    results: of these calls, while they are being counted.
    sources: the modules of convolutions whose results batch norm reads, while calls are being counted.
    readers: the modules of convolutions that read the results, and whether they are read elsewhere.
    pendings: those that have been returned, while calls are being counted.
    activations: those that activations have returned.
    was_refused: whether torch has computed the last call, which a recomputation has to repeat.
    refusals: reasons why torch computes other calls.
    """

    defers: bool = True
    joins_additions: bool = True
    computes_again: bool = True
    defers_activations: bool = False
    is_returned: bool = False
    results: list[_Result] = field(default_factory=list)
    is_counting: bool = False
    calls: Counter[GroupCall] = field(default_factory=Counter)
    sources: list[Any] = field(default_factory=list)
    readers: list[Any] = field(default_factory=list)
    is_read_elsewhere: bool = False
    pendings: list[weakref.ref[Tensor]] = field(default_factory=list)
    activations: list[weakref.ref[Tensor]] = field(default_factory=list)
    was_refused: bool = False
    refusals: set[str] = field(default_factory=set)

    def settle(self) -> None:
        """Set the choices by the calls that have been counted, and count no more.

        Call it while what the forward pass keeps for the backward pass is there.
        """
        self.joins_additions = any(call.has_addition and call.norm.function is not None for call in self.calls)
        has_group = any(call.has_addition or call.norm.function is not None for call in self.calls)
        is_kept = any(pending() is not None for pending in self.pendings)
        self.defers = has_group and not (self.is_returned or is_kept)
        self.computes_again = all(result.is_dropped() for result in self.results)
        self.is_read_elsewhere |= any(activation() is not None for activation in self.activations)
        self.is_counting, self.results, self.pendings, self.activations = False, [], [], []

    @property
    def has_one_reader(self) -> bool:
        """Whether each result of the calls that have been counted is read by one convolution, and by nothing else."""
        return not self.is_read_elsewhere and len(self.readers) == sum(self.calls.values())


@dataclass(frozen=True, slots=True, eq=False)
class Normalized:
    """A norm of x of which the statistics are known.

    weight, bias: (C,) or None.
    mean, inverse: as in ``normalization.moments``, or constants, as those of a frozen norm.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    inverse: Tensor
    bound: BoundNorm
    choices: GroupChoices

    def with_function(self, function: str | None, slope: float) -> Normalized:
        """Return the norm with an activation."""
        if function is None:
            return self
        bound = self.bound.with_function(function, slope)
        operands = self.x, self.weight, self.bias, self.mean, self.inverse
        return Normalized(*operands, bound, self.choices)

    def values(
        self, added: Tensor | None = None, *, keeps_mask: bool = False, y: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what ``normalization.forward`` does; autograd does not record it."""
        bound, statistics = self.bound, (self.mean, self.inverse)
        if bound.compiled is not None:
            mask = torch.empty(bound.mask_bytes, dtype=torch.uint8) if keeps_mask else None
            result = bound.compiled.forward(self.x, *statistics, self.weight, self.bias, added, mask, y)
            if result is not NotImplemented:
                return result, mask
        operands = *statistics, self.weight, self.bias, added
        return normalization.forward(self.x, bound.norm, *operands, keeps_mask=keeps_mask, y=y)


# Results that are computed again in the backward pass


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """What has computed a tensor, and can do so again.

    normalized: the norm, with the activation.
    added: the tensor that is added, the group that computes it, or None.
    """

    normalized: Normalized
    added: Tensor | Group | None

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors that computing it reads."""
        n = self.normalized
        operands = [n.x, n.weight, n.bias, n.mean, n.inverse]
        return operands + (self.added.tensors() if isinstance(self.added, Group) else [self.added])

    def norms(self) -> tuple[BoundNorm, ...]:
        """Return its norm, and that of the group that is added."""
        return self.normalized.bound, *(self.added.norms() if isinstance(self.added, Group) else ())

    @classmethod
    def of(cls, norms: tuple[BoundNorm, ...], tensors: Iterator[Any]) -> Group:
        """Return the group of these norms and tensors, as of the methods of these names."""
        x, weight, bias, mean, inverse = itertools.islice(tensors, 5)
        normalized = Normalized(x, weight, bias, mean, inverse, norms[0], _NO_CHOICES)
        return cls(normalized, cls.of(norms[1:], tensors) if len(norms) > 1 else next(tensors))

    def prologue(self) -> Prologue | None:
        """Return the tensor as what a convolution computes of x as it reads x; None if it cannot."""
        n = self.normalized
        if n.bound.norm.sets != 0 or self.added is not None:
            return None
        return Prologue(n.mean, n.inverse, n.weight, n.bias, n.bound.norm.function, n.bound.norm.slope)

    def computed(self) -> Tensor:
        """Return the tensor, differentiable if gradients are being recorded."""
        added = self.added.computed() if isinstance(self.added, Group) else self.added
        return compute(self.normalized, added) if torch.is_grad_enabled() else self.normalized.values(added)[0]


_NO_CHOICES = GroupChoices(computes_again=False)
_groups: _Notes[Group] = _Notes()


def remember(y: Tensor, normalized: Normalized, added: Tensor | None) -> None:
    """Note what has computed y, unless too much has to be computed for it.

    Of a chain of additions, as residual networks have, every second result is kept.
    """
    group = None if added is None else group_of(added)
    if group is None:
        _groups.note(y, Group(normalized, added))
    elif group.added is None:
        _groups.note(y, Group(normalized, group))


def group_of(y: Any) -> Group | None:
    """Return what has computed y and can do so again.

    Returns None for all else, for a tensor that has changed since, and while torch compiles.
    """
    return None if torch.compiler.is_compiling() or not isinstance(y, Tensor) else _groups.of(y)


# Moments that convolutions have computed


def remember_moments(y: Tensor, moments: Tensor) -> None:
    """Note the moments of a convolution's result, as of ``zero_moments``."""
    _moments.note(y, moments)


@contextmanager
def noting_sources() -> Iterator[None]:
    """Note the module of each convolution's result inside the block, for ``source_of``."""
    global _sources
    _sources = _Notes()
    try:
        yield
    finally:
        _sources = None


def note_source(y: Tensor, convolution: object) -> None:
    """Note the module that has computed y, if sources are being noted."""
    if _sources is not None:
        _sources.note(y, convolution)


def note_reader(x: Tensor, convolution: object) -> None:
    """Note that a module convolves x, if x is the result of a group whose calls are being counted."""
    group = group_of(x)
    if group is not None and group.normalized.choices.is_counting:
        group.normalized.choices.readers.append(convolution)


def source_of(x: Tensor) -> object | None:
    """Return the module whose convolution has computed x, as far as it was noted."""
    return None if _sources is None else _sources.of(x)


def moments_of(y: Tensor) -> Tensor | None:
    """Return the moments of a tensor that a convolution has computed; None for others, or if y has changed since."""
    return _moments.of(y)


# The node of autograd


def compute(normalized: Normalized, added: Tensor | None = None) -> Tensor:
    """Return function(norm + added), differentiable.

    added: of the shape, dtype and memory format of x.
    """
    y: Tensor = _apply_group(normalized, None, normalized.x, normalized.weight, normalized.bias, added)
    note_group(y, normalized, added)
    return y


def note_group(y: Tensor, normalized: Normalized, added: Tensor | None) -> None:
    """Note what has computed y, as far as the choices and a tape need it."""
    choices = normalized.choices
    if tape.recording() is not None:
        n = normalized
        tape.note(y, "group", _values_of, (n.x, n.weight, n.bias, n.mean, n.inverse, added), n.bound)
    if choices.computes_again:
        remember(y, normalized, added)
    if choices.is_counting:
        choices.calls[_call_of(normalized, added)] += 1
        choices.results.append(_Result.of(y, added))


def _values_of(tensors: Sequence[Any], bound: BoundNorm) -> Tensor:
    x, weight, bias, mean, inverse, added = tensors
    return Normalized(x, weight, bias, mean, inverse, bound, _NO_CHOICES).values(added)[0]


def _call_of(normalized: Normalized, added: Tensor | None) -> GroupCall:
    x, weight = normalized.x, normalized.weight if normalized.weight is not None else normalized.bias
    return GroupCall(
        norm=normalized.bound.norm,
        shape=tuple(x.shape),
        strides=x.stride(),
        dtype=x.dtype,
        weight_dtype=None if weight is None else weight.dtype,
        has_addition=added is not None,
        is_fixed=normalized.bound.is_fixed,
    )


class Node(torch.autograd.Function):
    """The gradients of a group, of which subclasses compute the result."""

    boxed_grads_call = False  # torch looks it up in every call, and an existing attribute is found faster

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return gradients_of(ctx, ctx.saved_tensors, ctx.bound, dy)


def gradients_of(ctx: Any, saved: tuple[Any, ...], bound: BoundNorm, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a node's operands.

    saved: the tensors that the node has saved, which some hooks allow to ask for only once.
    bound: the norm, with the activation behind it.
    """
    if bound.compiled is not None:
        known: tuple[Tensor | None, ...] = bound.compiled.backward(saved, ctx.needs_input_grad, dy)
        if known is not NotImplemented:
            return known
    x, weight, bias, mean, inverse, mask = saved
    needs_x, needs_weight, needs_bias, needs_added = ctx.needs_input_grad[2:]
    if torch.is_grad_enabled() or not is_plain(dy):
        gradients = _differentiable_gradients(
            bound.norm, dy, x, weight, bias, mean, inverse, mask, is_fixed=bound.is_fixed
        )
    else:
        dx, dadded, *sums = normalization.backward(
            _like(dy, x), x, bound.norm, mean, inverse, weight, bias, mask,
            is_fixed=bound.is_fixed, needs_dx=needs_x, needs_dadded=needs_added,
        )  # fmt: skip
        gradients = dx, *sums, dadded
    needed = zip((needs_x, needs_weight, needs_bias, needs_added), gradients, strict=True)
    return None, None, *(gradient if is_needed else None for is_needed, gradient in needed)


def save(ctx: Any, normalized: Normalized, mask: Tensor | None) -> None:
    """Keep what the gradients need."""
    operands = normalized.x, normalized.weight, normalized.bias
    ctx.save_for_backward(*operands, normalized.mean, normalized.inverse, mask)
    ctx.bound = normalized.bound


def c_apply(node: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the C function behind ``apply``, which takes half the time without the handling of torch.func."""
    return cast(Callable[..., Any], super(torch.autograd.Function, node).apply)  # type: ignore[misc]


class _Group(Node):
    @staticmethod
    def forward(ctx: Any, normalized: Normalized, _: None, *operands: Tensor | None) -> Tensor:
        added = operands[-1]
        keeps_mask = added is not None and normalized.bound.norm.function is not None
        y, mask = normalized.values(added, keeps_mask=keeps_mask)
        save(ctx, normalized, mask)
        return y


_apply_group = c_apply(_Group)


def _like(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy with the strides and the dtype of x."""
    if dy.stride() == x.stride() and dy.dtype == x.dtype:
        return dy
    return torch.empty_like(x).copy_(dy)


def _differentiable_gradients(
    norm: Norm,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    mask: Tensor | None,
    *,
    is_fixed: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients by torch's own operators, which can be differentiated again."""
    dz = dy
    if mask is not None:  # which has the derivative of the activation
        ones = torch.ones_like(x)
        operands = ones, x, norm, mean, inverse, weight, bias, mask
        _, derivative, _, _ = normalization.backward(*operands, needs_dx=False, needs_dadded=True)
        dz = dy * cast(Tensor, derivative)
        norm = replace(norm, function=None)
    statistics = (mean, inverse.pow(-2) - norm.eps) if is_fixed else None
    with torch.enable_grad():
        # Aliases, since x may depend on the weight; x among them, since torch's group norm crashes without its gradient
        # (not by view_as: a single sample with the channels last gets strides with which torch 2.13's batch norm
        # takes the pixels of a contiguous dy for channels).
        image = x.expand_as(x) if x.requires_grad else x.detach().requires_grad_()
        scale, shift = (
            parameter if parameter is None else parameter.view_as(parameter) for parameter in (weight, bias)
        )
        wanted = [operand for operand in (image, scale, shift) if operand is not None and operand.requires_grad]
        y = by_torch(norm, image, scale, shift, statistics, is_fixed=is_fixed)
        gradients = torch.autograd.grad(y, wanted, dz, create_graph=True)
    results = dict(zip(map(id, wanted), gradients, strict=True))
    return *(results.get(id(operand)) for operand in (image, scale, shift)), dz


def by_torch(
    norm: Norm,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: tuple[Tensor, Tensor] | None,
    added: Tensor | None = None,
    *,
    is_fixed: bool,
) -> Tensor:
    """Return what a group computes, by torch's own operators.

    statistics: running mean and variance of batch norm, or None.
    """
    if norm.sets == 0:
        mean, variance = statistics or (None, None)
        y = F.batch_norm(x, mean, variance, weight, bias, not is_fixed, 0.1, norm.eps)
    elif norm.sets == PIXELS:
        y = F.layer_norm(x, x.shape[1:], weight, bias, norm.eps)
    else:
        y = F.group_norm(x, norm.sets, weight, bias, norm.eps)
    y = y if added is None else y.add_(added)
    match norm.function:
        case None:
            return y
        case "ReLU" | "ReLU6" as function:
            return cast(Tensor, getattr(F, function.lower())(y, inplace=True))
        case "leaky_relu":
            return F.leaky_relu(y, norm.slope)
        case "gelu_tanh":
            return F.gelu(y, approximate="tanh")
        case function:
            return cast(Tensor, getattr(F, function.lower())(y))
