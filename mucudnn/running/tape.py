"""Values of a forward pass that the backward pass computes again instead of keeping them.

PyTorch's autograd keeps the tensors that gradients need. While a ``Tape`` records, it keeps instead, of each tensor
that is to be dropped, the call that computes it: values are computed again, not graphs, so the nodes of autograd, their
order, hooks, random numbers and running statistics are those of a forward pass that keeps everything. What cannot be
computed again with the same bits is kept: results of random operators, of code that the tape does not see, and
tensors that existed before.

Calls are those of ATen, below autograd and autocast (``torch.utils._python_dispatch``). Our convolutions and groups,
which PyTorch's dispatcher does not see, report themselves.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mucudnn.core.errors import MucudnnError
from mucudnn.running.eager.hot_path import set_dispatch_modes
from mucudnn.solver.keeping import Choice

LEAST_BYTES = 2**16  # of tensors that the tape knows; smaller ones are kept

_ATEN = torch.ops.aten
_BATCH_NORMS = {
    _ATEN.native_batch_norm.default,
    _ATEN._native_batch_norm_legit.default,
    _ATEN.cudnn_batch_norm.default,
}  # which update running statistics, whatever their schemas say
_UNINITIALIZED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_"}


class _OfThisThread(threading.local):
    tape: Tape | None = None


_this_thread = _OfThisThread()


def recording() -> Tape | None:
    """Return the tape that records in this thread."""
    return _this_thread.tape


class ChangedOperandError(MucudnnError, RuntimeError):
    """A tensor that the backward pass reads has been changed in place."""


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
        if self.tensor is not None:
            return self.kept()
        # What has to be computed, in the order of the forward pass.
        needed: dict[int, Value] = {}
        left = [self]
        while left:
            value = left.pop()
            if value.tensor is None and value.index not in needed:
                assert value.call is not None
                needed[value.index] = value
                left += value.call.reads()
        order = sorted(needed)
        last_reader = {self.index: -1}
        for index, value in sorted(needed.items()):
            assert value.call is not None
            last_reader |= {read.index: index for read in value.call.reads() if read.index in needed}
        # Each is freed, unless it is stored, after the last one that reads it.
        tensors: dict[int, Tensor] = {}
        for index in order:
            value = needed[index]
            assert value.call is not None
            tensors[index] = value.call.result(value.number, tensors)
            if value.choice is not Choice.EACH_TIME:
                value.store(tensors[index])
            for read in value.call.reads():
                if last_reader.get(read.index) == index:
                    tensors.pop(read.index, None)
        for value in needed.values():
            if value.choice is not Choice.EACH_TIME:
                value.call = None
        return tensors[self.index]

    def kept(self) -> Tensor:
        """Return the stored tensor. Raises ``ChangedOperandError`` if it was changed since."""
        assert self.tensor is not None
        _require_unchanged(self.tensor, self.source(), self.version)
        return self.tensor


def _require_unchanged(tensor: Tensor, source: Tensor | None, version: int) -> None:
    if source is not None and source._version != version:
        raise ChangedOperandError(
            f"a tensor of shape {tuple(tensor.shape)} that a gradient needs was changed in place after the forward "
            "pass had read it: change it out of place"
        )


class Call:
    """A call of an operator or of a group, which can be repeated.

    function, arguments, named: with values in the place of tensors.
    is_in_place: whether the first argument is written.
    """

    __slots__ = ("arguments", "function", "is_in_place", "named")

    def __init__(
        self, function: Callable[..., Any], arguments: Any, named: dict[str, Any], *, is_in_place: bool
    ) -> None:
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
        self._values: dict[int, tuple[weakref.ref[Any], dict[Any, Value]]] = {}  # by storage and place in it
        self._others: dict[int, list[weakref.ref[Value]]] = {}  # of operands that no call computes again, by storage
        self._stack = ExitStack()

    def __enter__(self) -> Tape:
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
        super().__enter__()  # type: ignore[no-untyped-call]
        set_dispatch_modes(_modes_beside_a_tape)
        _this_thread.tape = self
        return self

    def __exit__(self, *error: Any) -> None:
        _this_thread.tape = None
        self._values.clear()
        self._others.clear()
        set_dispatch_modes(torch._C._len_torch_dispatch_stack)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    # Saved tensors

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps of a tensor: its value, or the tensor with its version."""
        return self.value_of(tensor) or (tensor, tensor._version)

    def unpack(self, kept: Any) -> Tensor:
        """Return a tensor of which autograd has kept this. Raises ``ChangedOperandError`` if it was changed."""
        if isinstance(kept, Value):
            return kept.computed()
        tensor, version = kept  # which autograd does not compare where there are hooks
        _require_unchanged(tensor, tensor, version)
        return cast(Tensor, tensor)

    # Calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, schema = kwargs or {}, func._schema
        if func is _ATEN.detach.default:  # in the same place as what is detached
            return func(*args, **named)
        is_unknown = torch.Tag.nondeterministic_seeded in func.tags or schema.name[6:] in _UNINITIALIZED
        if schema.is_mutable and func not in _BATCH_NORMS:
            is_written = [
                argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
            ]
            is_in_place = is_written[0] and sum(is_written) == 1 and not is_unknown
            is_known = is_in_place and self.value_of(args[0]) is not None
            operands = self.operands(args, named) if is_known else None
            for tensor in itertools.compress(args, is_written):
                if isinstance(tensor, Tensor):
                    self._overwrite(tensor)
            result = func(*args, **named)
            if operands is not None:
                self.note((result,), func.name(), Call(func, *operands, is_in_place=True))
            return result
        result = func(*args, **named)
        if is_unknown:
            return result
        results = result if isinstance(result, (tuple, list)) else (result,)
        if any(isinstance(tensor, Tensor) and tensor.nbytes >= LEAST_BYTES for tensor in results):
            if func in _BATCH_NORMS and args[5]:  # in training; other running statistics, of their dtype, are updated
                args = *args[:3], *(one if one is None else torch.zeros_like(one) for one in args[3:5]), *args[5:]
            self.note(results, func.name(), Call(func, *self.operands(args, named), is_in_place=False))
        return result

    def note(self, results: Sequence[Any], name: str, call: Call) -> None:
        """Note that a call has computed these tensors, and keep those that are to be kept."""
        for number, tensor in enumerate(results):
            if not isinstance(tensor, Tensor) or tensor.nbytes < LEAST_BYTES or self.value_of(tensor) is not None:
                continue  # known: an alias
            value = Value(call, number, self._choice(name), self.count)
            self.count += 1
            if value.choice is Choice.KEPT:
                value.store(tensor)
                value.version += call.is_in_place  # which PyTorch counts after this
                value.call = None
            self._values_of(tensor)[_place(tensor)] = value

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
        return None if known is None else known[1].get(_place(tensor))

    def operands(self, args: Any, named: Any) -> tuple[Any, Any]:
        """Return arguments with values in the place of tensors."""

        def value(tensor: Tensor) -> Value:
            known = self.value_of(tensor)
            if known is None:
                known = Value.of(tensor)
                self._others.setdefault(tensor.untyped_storage()._cdata, []).append(weakref.ref(known))
            return known

        operands: tuple[Any, Any] = tree_map_only(Tensor, value, (args, named))
        return operands

    def _values_of(self, tensor: Tensor) -> dict[Any, Value]:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._values:
            values = self._values

            def forget(_: object) -> None:
                values.pop(key, None)

            values[key] = weakref.ref(storage, forget), {}
        return self._values[key][1]

    def _overwrite(self, tensor: Tensor) -> None:
        """Forget the values in a tensor's memory, which is about to be written; kept ones get memory of their own."""
        values = self._values_of(tensor)
        others = (known() for known in self._others.pop(tensor.untyped_storage()._cdata, ()))
        for value in (*values.values(), *others):
            if value is not None and value.tensor is not None:
                value.store(value.tensor.clone())
        values.clear()


def _modes_beside_a_tape() -> int:
    """Return how many dispatch modes may have to see calls of convolutions and norms, which report to the tape."""
    return torch._C._len_torch_dispatch_stack() - (_this_thread.tape is not None)


def note(y: Tensor, name: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Tell the tape that records, if any, that function(*arguments) has computed y out of its sight."""
    tape = _this_thread.tape
    if tape is not None and y.nbytes >= LEAST_BYTES:
        operands, _ = tape.operands(arguments, {})
        tape.note((y,), name, Call(function, operands, {}, is_in_place=False))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
