"""Values of a forward pass that the backward pass computes again instead of keeping them.

PyTorch's autograd keeps the tensors that gradients need. While a ``Tape`` records, it keeps instead, of each tensor
that is to be dropped, the call that computes it: values are computed again, not graphs, so the nodes of autograd, their
order, hooks, random numbers and running statistics are those of a forward pass that keeps everything. What cannot be
computed again with the same bits is kept: results of random operators, of code that the tape does not see, and
tensors that existed before.

Calls are those of ATen, below autograd and autocast (``torch.utils._python_dispatch``), and groups, which report
themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mucudnn.core.errors import InvalidInputError, MucudnnError
from mucudnn.running.modules import TunedModule, derived_tuned, require_free_names
from mucudnn.solver.keeping import Choice

LEAST_BYTES = 2**16  # of tensors that the tape knows; smaller ones are kept

_ATEN = torch.ops.aten
_BATCH_NORMS = {
    _ATEN.native_batch_norm.default,
    _ATEN._native_batch_norm_legit.default,
    _ATEN.cudnn_batch_norm.default,
}  # which update running statistics, whatever their schemas say
_UNINITIALIZED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_"}

active: Tape | None = None  # the one that records in this process; training runs in one thread


class ChangedOperandError(MucudnnError, RuntimeError):
    """A tensor from which a dropped one is to be computed has been changed in place."""


class Value:
    """A tensor of the forward pass.

    call: computes the tensor; None once there is a tensor.
    number: of the call's results.
    choice: whether the tensor is stored.
    tensor: None while it is dropped.
    source: what was stored, as long as it is there, with its version then.
    index: in the order of the tape; -1 for operands that existed before.
    """

    __slots__ = ("__weakref__", "call", "choice", "index", "number", "source", "tensor", "version")

    def __init__(self, call: Call | None, number: int, choice: Choice, index: int) -> None:
        self.call, self.number, self.choice, self.index = call, number, choice, index
        self.tensor: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Value:
        """Return the value of a tensor that no call computes again."""
        value = cls(None, 0, Choice.KEPT, -1)
        value.store(tensor)
        return value

    def store(self, tensor: Tensor) -> None:
        """Keep the tensor instead of the call."""
        self.tensor = tensor.detach()  # not the tensor: it may have a node of autograd that keeps this value
        self.source, self.version = weakref.ref(tensor), tensor._version

    def computed(self) -> Tensor:
        """Return the tensor, computed again if it was dropped, with all that it is computed from."""
        needed: dict[int, Value] = {}
        left = [self]
        while left:
            value = left.pop()
            if value.tensor is None and value.index not in needed:
                assert value.call is not None
                needed[value.index] = value
                left += value.call.reads()
        order = sorted(needed)
        readers = {index: order[-1] for index in order}  # the last one of each
        for index in order:
            call = needed[index].call
            readers |= {read.index: index for read in (call.reads() if call is not None else ()) if read.index in needed}
        readers[self.index] = -1
        tensors: dict[int, Tensor] = {}
        for index in order:
            value = needed[index]
            assert value.call is not None
            reads = [read for read in value.call.reads() if read.index in needed]
            tensors[index] = value.call.result(value.number, tensors)
            if value.choice is not Choice.EACH_TIME:
                value.store(tensors[index])
            for read in reads:
                if readers[read.index] == index and read is not self:
                    tensors.pop(read.index, None)
        for index, value in needed.items():
            if value.choice is not Choice.EACH_TIME:
                value.call = None
        return self.kept() if self.tensor is not None else tensors[self.index]

    def kept(self) -> Tensor:
        """Return the stored tensor. Raises ``ChangedOperandError`` if it was changed since."""
        assert self.tensor is not None
        source = self.source()
        if source is not None and source._version != self.version:
            raise ChangedOperandError(
                f"a tensor of shape {tuple(self.tensor.shape)} was changed in place after the forward pass had read it, "
                "and a result is to be computed from it again; change it out of place, or optimize without "
                "memory_budget"
            )
        return self.tensor


class Call:
    """A call of an operator or of a group, which can be repeated.

    function, arguments, named: with values in the place of tensors.
    is_in_place: whether the first argument is written.
    """

    __slots__ = ("arguments", "function", "is_in_place", "named")

    def __init__(self, function: Callable[..., Any], arguments: Any, named: dict[str, Any], *, is_in_place: bool) -> None:
        self.function, self.arguments, self.named, self.is_in_place = function, arguments, named, is_in_place

    def reads(self) -> list[Value]:
        return [leaf for leaf in tree_leaves((self.arguments, self.named)) if isinstance(leaf, Value)]

    def result(self, number: int, tensors: dict[int, Tensor]) -> Tensor:
        """Repeat the call, and return one of its results.

        tensors: of dropped values, by index.
        """

        def tensor_of(value: Value) -> Tensor:
            return value.kept() if value.tensor is not None else tensors[value.index]

        arguments, named = tree_map_only(Value, tensor_of, (self.arguments, self.named))
        if self.is_in_place:
            arguments = arguments[0].clone(), *arguments[1:]
        with torch.no_grad(), torch._C._DisableAutocast():
            results = self.function(*arguments, **named)
        result: Tensor = results[number] if isinstance(results, (tuple, list)) else results
        return result


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which the forward pass of a model drops what the choices say.

    choices: of the values, in their order, each with the name of the operator that computes it. A value beyond the
        last one, or of another operator, is computed again once.
    """

    def __init__(self, choices: Sequence[tuple[str, Choice]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices = choices
        self.count = 0
        self.matches = True
        self._values: dict[int, tuple[weakref.ref[Any], dict[Any, weakref.ref[Value]]]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Tape:
        global active
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
        super().__enter__()
        active = self
        return self

    def __exit__(self, *error: Any) -> None:
        global active
        active = None
        super().__exit__(*error)
        self._stack.close()

    # Saved tensors

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps of a tensor: the tensor, or its value."""
        return self.value_of(tensor) or tensor

    def unpack(self, kept: Any) -> Tensor:
        """Return a tensor of which autograd has kept this."""
        return kept.computed() if isinstance(kept, Value) else kept

    # Calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, begun_s = kwargs or {}, perf_counter()
        if self._is_unknown(func):
            return func(*args, **named)
        schema = func._schema
        written = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
        if schema.is_mutable and func not in _BATCH_NORMS:
            is_in_place = len(written) == 1 and written[0] is schema.arguments[0] and isinstance(args[0], Tensor)
            operands = self._operands(args, named) if is_in_place else None
            for argument, value in zip(schema.arguments, args, strict=False):
                if argument in written and isinstance(value, Tensor):
                    self._overwrite(value)
            result = func(*args, **named)
            if operands is not None:
                self.note((result,), func.name(), Call(func, *operands, is_in_place=True), begun_s)
            return result
        result = func(*args, **named)
        results = result if isinstance(result, (tuple, list)) else (result,)
        if any(isinstance(tensor, Tensor) and tensor.nbytes >= LEAST_BYTES for tensor in results):
            if func in _BATCH_NORMS and args[5]:  # in training; running statistics are not updated again
                args = *args[:3], None, None, *args[5:]
            self.note(results, func.name(), Call(func, *self._operands(args, named), is_in_place=False), begun_s)
        return result

    @staticmethod
    def _is_unknown(func: Any) -> bool:
        return torch.Tag.nondeterministic_seeded in func.tags or func._schema.name[6:] in _UNINITIALIZED

    def note(self, results: Sequence[Any], name: str, call: Call, begun_s: float) -> None:
        """Note that a call has computed these tensors, and keep those that are to be kept.

        begun_s: when the call began, by ``perf_counter``.
        """
        for number, tensor in enumerate(results):
            if not isinstance(tensor, Tensor) or tensor.nbytes < LEAST_BYTES or self.value_of(tensor) is not None:
                continue  # known: an alias
            value = Value(call, number, self._choice(name), self.count)
            self.count += 1
            if value.choice is Choice.KEPT:
                value.store(tensor)
                value.call = None
            self._values_of(tensor)[_place(tensor)] = weakref.ref(value)
            tensor.__dict__["_mucudnn_value"] = value  # which is needed as long as the tensor may be read

    def _choice(self, name: str) -> Choice:
        if self.count < len(self.choices) and self.matches:
            known, choice = self.choices[self.count]
            self.matches = known == name
            if self.matches:
                return choice
        return Choice.ONCE

    def value_of(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor; None if none is known."""
        known = self._values.get(tensor.untyped_storage()._cdata)
        if known is None:
            return None
        value = known[1].get(_place(tensor))
        return None if value is None else value()

    def _operands(self, args: Any, named: Any) -> tuple[Any, Any]:
        operands: tuple[Any, Any] = tree_map_only(
            Tensor, lambda tensor: self.value_of(tensor) or Value.of(tensor), (args, named)
        )
        return operands

    def _values_of(self, tensor: Tensor) -> dict[Any, weakref.ref[Value]]:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._values:
            forget = weakref.ref(storage, lambda _, key=key, values=self._values: values.pop(key, None))
            self._values[key] = forget, {}
        return self._values[key][1]

    def _overwrite(self, tensor: Tensor) -> None:
        """Forget the values in a tensor's memory, which is about to be written; kept ones get memory of their own."""
        values = self._values_of(tensor)
        for known in values.values():
            value = known()
            if value is not None and value.tensor is not None:
                value.store(value.tensor.clone())
        values.clear()


class KeepingModule(TunedModule, nn.Module):
    """A model of which a forward pass keeps what was chosen, so that a training step stays within a budget.

    keeping: the choices; None to keep all that PyTorch keeps.
    """

    keeping: Any = None

    def forward(self, *arguments: Any, **named: Any) -> Any:
        is_recorded = torch.is_grad_enabled() and self.training and not torch.compiler.is_compiling()
        if self.keeping is None or not is_recorded or active is not None:
            return super().forward(*arguments, **named)
        with Tape(self.keeping.choices):
            return super().forward(*arguments, **named)


def make_keeping(model: nn.Module) -> KeepingModule:
    """Let a model keep what is chosen. Raises ``InvalidInputError`` if its class cannot be changed."""
    if isinstance(model, TunedModule) and not isinstance(model, KeepingModule):
        raise InvalidInputError(f"{type(model).__name__} is a single layer; memory_budget is for models of several")
    if not isinstance(model, KeepingModule):
        require_free_names(model)
        object.__setattr__(model, "__class__", derived_tuned(KeepingModule, type(model)))
    return cast(KeepingModule, model)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
