"""Pending tensors: results of norms whose values have not been computed.

An addition or an activation that is called on one, by any of PyTorch's names, computes everything in one pass, as a
group. Anything else computes the values of the norm first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from mucudnn.core.errors import MucudnnError
from mucudnn.kernels.pages import on_huge_pages
from mucudnn.running import tape
from mucudnn.running.eager.hot_path import is_plain
from mucudnn.running.groups import Group, Node, Normalized, c_apply, compute, gradients_of, note_group, save

_WITH_MASKS = {"ReLU", "ReLU6", "leaky_relu"}  # whose derivatives have two values
_ADVICE = "optimize the model with Config(fuse=False), which leaves norms alone"


class ChangedError(MucudnnError, RuntimeError):
    """An operand of a group was changed in place before the group was computed."""


class _Deferred(Node):
    """The node of a pending tensor, for what PyTorch computes of it without asking ``Pending``.

    The node of a norm is also that of the first activation of it, which has the second result.
    """

    @staticmethod
    def forward(ctx: Any, normalized: Normalized, _: None, *operands: Tensor | None) -> tuple[Tensor, Tensor | None]:
        save(ctx, normalized, None)
        ctx.set_materialize_grads(False)
        x = normalized.x
        pending = Pending._make_wrapper_subclass(Pending, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)
        is_deferred = normalized.choices.defers_activations or normalized.bound.norm.function is not None
        if is_deferred or operands[-1] is not None:  # of which the gradients may need a mask
            return pending, None
        pending.node = ctx
        return pending, on_huge_pages(torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_pending, of_y = gradients
        saved, results = ctx.saved_tensors, []
        if of_pending is not None:
            results.append(gradients_of(ctx, saved, ctx.bound, of_pending))
        if of_y is not None:
            results.append(gradients_of(ctx, saved, ctx.activated, of_y))
        if len(results) < 2:
            return results[0] if results else (None,) * len(ctx.needs_input_grad)
        return (*(None if first is None else first + second for first, second in zip(*results, strict=True)),)


class _Replaced(torch.autograd.Function):
    """The node of a pending tensor that an operation in place has changed: its gradient is that of the result."""

    @staticmethod
    def forward(ctx: Any, pending: Tensor, result: Tensor) -> Tensor:
        ctx.mark_dirty(pending)
        return pending

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


_apply_deferred, _apply_replaced = c_apply(_Deferred), c_apply(_Replaced)


class Pending(Tensor):
    """The result of a norm, or of a norm and an addition or an activation, before its values are computed.

    normalized: the norm, with the activation.
    added: what is added to it, or None.
    versions: of the operands when this object was made.
    node, unfilled: the node of autograd, and its result without values, until there is an activation; None for sums.
    tensor: the computed tensor, or another pending tensor, once there is one.
    aliases: refer to pending tensors that this one has replaced, in operations in place.
    """

    normalized: Normalized
    added: Tensor | None = None
    versions: list[int]
    node: Any = None
    unfilled: Tensor | None = None
    tensor: Tensor | None = None
    aliases: tuple[weakref.ref[Pending], ...] = ()

    @classmethod
    def of(cls, normalized: Normalized, added: Tensor | None = None) -> Pending:
        pending: Pending
        operands = normalized.x, normalized.weight, normalized.bias, added
        pending, y = _apply_deferred(normalized, None, *operands)
        pending.normalized, pending.versions = normalized, _versions(*operands)
        if added is None:
            pending.unfilled = y
        else:
            pending.added = added
        return pending

    def replace(self, result: Tensor) -> None:
        """Let the result of an operation in place be this tensor's value, and that of its aliases, for autograd too."""
        self.tensor = result
        with torch._C.DisableTorchFunctionSubclass():
            for pending in (self, *(alias() for alias in self.aliases)):
                if pending is not None:
                    _apply_replaced(pending, result)
        if isinstance(result, Pending):
            result.aliases = (weakref.ref(self), *self.aliases)

    def computed(self, *, by_convolution: bool = False) -> Tensor:
        """Return the tensor that this one stands for, differentiable.

        by_convolution: whether a tuned convolution reads it.
        """
        latest, choices = self.latest(), self.normalized.choices
        choices.is_read_elsewhere |= choices.is_counting and not by_convolution
        if not isinstance(latest, Pending):
            return latest
        with torch.enable_grad():  # what runs later may need it
            latest.tensor = latest.activated(None)
        return latest.tensor

    def latest(self) -> Tensor:
        """Return what has this tensor's place after operations in place; the computed tensor if there is one."""
        latest: Tensor = self
        while isinstance(latest, Pending) and latest.tensor is not None:
            latest = latest.tensor
        return latest

    def activated(self, function: str | None, slope: float = 0.01) -> Tensor:
        """Compute this tensor and an activation of it, as one group."""
        normalized, y = self.unchanged().with_function(function, slope), self.unfilled
        if y is None or not torch.is_grad_enabled():
            return compute(normalized, self.added)
        normalized.values(y=y)
        self.node.activated, self.node, self.unfilled = normalized.bound, None, None
        note_group(y, normalized, None)
        return y

    def deferred(self, function: str, slope: float) -> Pending:
        """Return a pending tensor of an activation of this one, for a convolution that normalizes what it reads."""
        result = Pending.of(self.unchanged().with_function(function, slope))
        self.node = self.unfilled = None
        if self.normalized.choices.is_counting:
            self.normalized.choices.activations.append(weakref.ref(result))
        return result

    @property
    def may_be_added_to(self) -> bool:
        return self.added is None and self.normalized.bound.norm.function is None

    @property
    def group(self) -> Group | None:
        """What computes the tensor, if that is a norm with an activation, and no operand has changed."""
        is_norm = self.added is None and self.normalized.bound.norm.function is not None
        return Group(self.unchanged(), None) if is_norm else None

    def unchanged(self) -> Normalized:
        """Return the norm. Raises ``ChangedError`` if an operand has changed since this object was made."""
        n = self.normalized
        if _versions(n.x, n.weight, n.bias, self.added) != self.versions:
            raise ChangedError(f"an operand of a norm was changed in place before its result was used: {_ADVICE}")
        return n

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        take = _TAKEN.get(func)
        if take is not None:
            result = take(*args, **kwargs)
            if result is not NotImplemented:
                return result
        elif func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        pendings = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Pending)]
        tensors = [pending.computed() for pending in pendings]
        versions = [tensor._version for tensor in tensors]
        args, kwargs = tree_map_only(Pending, Pending.computed, (args, kwargs))
        result = func(*args, **kwargs)
        for pending, tensor, version in zip(pendings, tensors, versions, strict=True):
            if tensor._version != version:
                pending.replace(tensor)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute what reaches torch's dispatcher without ``__torch_function__``; autograd has recorded it already."""
        if func._schema.is_mutable:
            raise ChangedError(f"{func} changes the result of a norm, out of sight of groups: {_ADVICE}")
        args, kwargs = tree_map_only(Pending, Pending._values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _values(self) -> Tensor:
        latest = self.latest()
        self.normalized.choices.is_read_elsewhere |= self.normalized.choices.is_counting
        if not isinstance(latest, Pending):
            return latest.detach()
        with torch.no_grad():
            return latest.activated(None)


def _versions(*operands: Tensor | None) -> list[int]:
    return [operand._version for operand in operands if operand is not None]


# What PyTorch calls on pending tensors

_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point),
    *(Tensor.is_complex, Tensor.__len__, Tensor.ndimension, Tensor.nelement, Tensor.element_size),
}


def _activate(input: Any, function: str, *, in_place: bool, slope: float = 0.01) -> Any:
    """Return the activation of a pending tensor; NotImplemented if it is computed by torch."""
    pending = input.latest() if isinstance(input, Pending) else input
    if in_place and not torch.is_grad_enabled():  # which changes values that autograd does not know of
        return NotImplemented
    if not isinstance(pending, Pending) or (pending.added is not None and function not in _WITH_MASKS):
        return NotImplemented
    norm, choices = pending.normalized.bound.norm, pending.normalized.choices
    if norm.function is not None:
        return NotImplemented
    may_defer = torch.is_grad_enabled() and pending.added is None and norm.sets == 0 and tape.recording() is None
    is_deferred = may_defer and (choices.defers_activations or choices.is_counting)
    y = pending.deferred(function, slope) if is_deferred else pending.activated(function, slope)
    if in_place:
        pending.replace(y)
    return y


def _relu(input: Any, inplace: Any = False) -> Any:
    return _activate(input, "ReLU", in_place=inplace)


def _relu_(input: Any) -> Any:
    return _activate(input, "ReLU", in_place=True)


def _relu6(input: Any, inplace: Any = False) -> Any:
    return _activate(input, "ReLU6", in_place=inplace)


def _hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: Any = False) -> Any:
    return _relu6(input, inplace) if (min_val, max_val) == (0, 6) else NotImplemented


def _leaky_relu(input: Any, negative_slope: float = 0.01, inplace: Any = False) -> Any:
    return _activate(input, "leaky_relu", in_place=inplace, slope=float(negative_slope))


def _silu(input: Any, inplace: Any = False) -> Any:
    return _activate(input, "SiLU", in_place=inplace)


def _hardswish(input: Any, inplace: Any = False) -> Any:
    return _activate(input, "hardswish", in_place=inplace)


def _gelu(input: Any, *, approximate: str = "none") -> Any:
    return _activate(input, "gelu" if approximate == "none" else "gelu_tanh", in_place=False)


def _add(input: Any, other: Any, *, alpha: float = 1) -> Any:
    """Return the pending sum of a pending tensor and another one; NotImplemented if it is computed by torch."""
    return _sum(input, other) if alpha == 1 else NotImplemented


def _add_(input: Any, other: Any, *, alpha: float = 1) -> Any:
    latest = input.latest() if isinstance(input, Pending) else input
    if alpha != 1 or not isinstance(latest, Pending) or not torch.is_grad_enabled():
        return NotImplemented
    result = _sum(latest, other)
    if result is not NotImplemented:
        latest.replace(result)
    return result


def _sum(first: Any, second: Any) -> Any:
    terms = [term.latest() if isinstance(term, Pending) else term for term in (first, second)]
    pending = next((term for term in terms if isinstance(term, Pending) and term.may_be_added_to), None)
    if pending is None:
        return NotImplemented
    other = terms[0] if terms[1] is pending else terms[1]
    if isinstance(other, Pending):
        other = other.computed()
    x = pending.normalized.x
    if not isinstance(other, Tensor) or not is_plain(other):
        return NotImplemented
    if (other.shape, other.stride(), other.dtype) != (x.shape, x.stride(), x.dtype):
        return NotImplemented
    if not pending.normalized.choices.joins_additions:
        return compute(pending.unchanged(), other)
    pending.node = pending.unfilled = None
    return Pending.of(pending.normalized, other)


_TAKEN: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
    **dict.fromkeys((torch.relu_, Tensor.relu_), _relu_),
    **{F.relu6: _relu6, F.hardtanh: _hardtanh, F.leaky_relu: _leaky_relu},
    **{F.silu: _silu, F.hardswish: _hardswish, F.gelu: _gelu},
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), _add_),
}
