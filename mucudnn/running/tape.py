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

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
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
_FILLED_LATER = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_"),
    *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"),
}  # maybe by code that the tape does not see


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
    version: of an operand that existed before, when it was read first, and of a result at the end of the tape; None
        before, and of a tensor that nobody else has.
    index: in the order of the tape; -1 for operands that existed before.
    is_trained: whether parameters that the backward pass updates are needed to compute it.
    is_detached: whether autograd does not know of that.
    """

    __slots__ = (
        *("__weakref__", "call", "choice", "index", "is_detached", "is_trained", "number", "tensor", "version"),
    )

    def __init__(self, call: Call | None, number: int, choice: Choice, index: int) -> None:
        self.call, self.number, self.choice, self.index = call, number, choice, index
        self.is_trained = self.is_detached = False
        self.tensor: Tensor | None = None
        self.version: int | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Value:
        """Return the value of a tensor that no call computes again."""
        value = cls(None, 0, Choice.KEPT, -1)
        value.keep(tensor)
        value.seal()
        return value

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor instead of the call."""
        self.tensor = _alias(tensor)  # not the tensor: it may have a node of autograd that keeps this value
        self.call, self.is_trained, self.is_detached = None, False, False

    def seal(self) -> None:
        """Note the version of the stored tensor, which no code that the tape does not see may write from now on."""
        if self.tensor is not None and not self.tensor.is_inference():
            self.version = self.tensor._version

    def computed(self) -> Tensor:
        """Return the tensor, computed again if it was dropped, with all that it is computed from.

        Several threads may call this: what one has stored meanwhile, another one computes, too.
        """
        # What has to be computed, in the order of the forward pass.
        needed: dict[int, tuple[Value, Call]] = {}
        left = [self]
        while left:
            value = left.pop()
            call = value.call  # None only where there is a tensor
            if value.tensor is None and call is not None and value.index not in needed:
                needed[value.index] = value, call
                left += call.reads()
        if self.index not in needed:
            return self.kept()
        order = sorted(needed)
        last_reader = {self.index: -1}
        for index in order:
            last_reader |= {read.index: index for read in needed[index][1].reads() if read.index in needed}
        # Each is freed, unless it is stored, after the last one that reads it.
        tensors: dict[int, Tensor] = {}
        for index in order:
            value, call = needed[index]
            tensors[index] = call.result(value.number, tensors)
            if value.choice is not Choice.EACH_TIME:
                value.tensor = tensors[index]
            for read in call.reads():
                if last_reader.get(read.index) == index:
                    tensors.pop(read.index, None)
        for value, _ in needed.values():
            if value.choice is not Choice.EACH_TIME:
                value.call = None
        return tensors[self.index]

    def kept(self) -> Tensor:
        """Return the stored tensor. Raises ``ChangedOperandError`` if it was changed since."""
        assert self.tensor is not None
        if not self.is_unchanged():
            _refuse(self.tensor)
        return self.tensor

    def is_unchanged(self) -> bool:
        return self.tensor is None or self.version is None or self.tensor._version == self.version


def _alias(tensor: Tensor) -> Tensor:
    """Return the tensor without its node of autograd, of the same version as the tensor from now on."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # which counts versions
        return tensor.detach()


def _refuse(tensor: Tensor) -> NoReturn:
    raise ChangedOperandError(
        f"a tensor of shape {tuple(tensor.shape)} that a gradient needs was changed in place after the forward pass "
        "had read it: change it out of place, or after the backward pass"
    )


class Call:
    """A call of an operator or of a group, which can be repeated.

    function, arguments, named: with values in the place of tensors.
    is_in_place: whether the first argument is written.
    is_trained, is_detached: of the results, as in ``Value``.
    """

    __slots__ = ("arguments", "function", "is_detached", "is_in_place", "is_trained", "named")

    def __init__(
        self, function: Callable[..., Any], arguments: Any, named: dict[str, Any], *, is_in_place: bool
    ) -> None:
        self.function, self.arguments, self.named, self.is_in_place = function, arguments, named, is_in_place
        self.is_trained = self.is_detached = False

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
    trained: parameters that hooks update in the backward pass, as soon as their gradients are there. Autograd sees to
        it that what reads their old values has run by then; what is computed from them without its knowledge is kept.
    """

    def __init__(self, choices: Sequence[tuple[str, Choice]] = (), trained: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.choices = choices
        self.trained = {memory_of(parameter) for parameter in trained}
        self.count = 0
        self.matches = True
        self._values: dict[int, tuple[weakref.ref[Any], dict[Any, Value]]] = {}  # by storage and place in it
        self._others: dict[int, list[weakref.ref[Value]]] = {}  # of operands that no call computes again, by storage
        self._stack = ExitStack()

    def __enter__(self) -> Tape:
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
        super().__enter__()  # type: ignore[no-untyped-call]
        _count_tapes(1)
        with _lock:
            _tapes.add(self)
        _this_thread.tape = self
        return self

    def __exit__(self, *error: Any) -> None:
        _this_thread.tape = None
        for _, values in [*self._values.values()]:
            for value in values.values():
                value.seal()
        self._values.clear()
        _count_tapes(-1)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note no calls in the block; what autograd keeps is packed as before."""
        _this_thread.tape = None
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__enter__()  # type: ignore[no-untyped-call]
            _this_thread.tape = self

    # Saved tensors

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps of a tensor: its value, or the tensor with its version."""
        value = self.value_of(tensor)
        if value is None:
            return tensor, tensor._version
        if value.is_detached:
            value.keep(tensor)
        return value

    def unpack(self, kept: Any) -> Tensor:
        """Return a tensor of which autograd has kept this. Raises ``ChangedOperandError`` if it was changed."""
        if isinstance(kept, Value):
            # A gradient may be computed within the forward pass; no mode sees what is computed again for it.
            with nullcontext() if _this_thread.tape is None else _disable_current_modes():
                return kept.computed()
        tensor, version = kept  # which autograd does not compare where there are hooks
        if tensor._version != version:
            _refuse(tensor)
        return cast(Tensor, tensor)

    # Calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, schema = kwargs or {}, func._schema
        if func is _ATEN.detach.default:  # in the same place as what is detached
            value = self.value_of(args[0]) if self.trained else None
            if value is not None:
                value.is_detached = value.is_trained
            return func(*args, **named)
        is_unknown = torch.Tag.nondeterministic_seeded in func.tags or schema.name[6:] in _FILLED_LATER
        is_unknown |= func is _ATEN._to_copy.default and args[0].is_leaf and args[0].requires_grad  # autocast keeps it
        if schema.is_mutable and func not in _BATCH_NORMS:
            given = *args, *(named.get(argument.name) for argument in schema.arguments[len(args) :])
            written = [
                tensors
                for argument, tensors in zip(schema.arguments, given, strict=True)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            is_in_place = len(written) == 1 and isinstance(written[0], Tensor) and written[0] is given[0]
            is_known = is_in_place and not is_unknown and self.value_of(args[0]) is not None
            call = self.call(func, args, named, is_in_place=True) if is_known else None
            self.overwrite(written)
            result = self.run(func, args, named)
            if call is not None:
                self.note((result,), func.name(), call)
            return result
        updates_statistics = func in _BATCH_NORMS and args[5]  # in training
        if updates_statistics:
            self.overwrite(args[3:5])
        result = self.run(func, args, named)
        if is_unknown:
            return result
        results = result if isinstance(result, (tuple, list)) else (result,)
        if any(map(_is_large, results)):
            if updates_statistics:  # others, of their dtype, the next time
                args = *args[:3], *(one if one is None else torch.zeros_like(one) for one in args[3:5]), *args[5:]
            self.note(results, func.name(), self.call(func, args, named))
        return result

    def run(self, func: Any, args: Any, named: Any) -> Any:
        """Run an operator."""
        return func(*args, **named)

    def note(self, results: Sequence[Any], name: str, call: Call) -> list[Value]:
        """Note that a call has computed these tensors, and keep those that are to be kept; return the new values."""
        values = []
        for number, tensor in enumerate(results):
            if not _is_large(tensor) or self.value_of(tensor) is not None:
                continue  # known: an alias
            value = Value(call, number, self._choice(name), self.count)
            self.count += 1
            value.is_trained = call.is_trained
            value.is_detached = call.is_detached or (call.is_trained and not tensor.is_floating_point())
            if value.choice is Choice.KEPT:
                value.keep(tensor)
            self._values_of(tensor)[_place(tensor)] = value
            values.append(value)
        return values

    def note_unseen(self, y: Tensor, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Note that function(*arguments), which PyTorch's dispatcher does not see, has computed y."""
        self.note((y,), name, self.call(function, arguments, {}))

    def _choice(self, name: str) -> Choice:
        if self.count < len(self.choices) and self.matches:
            known, choice = self.choices[self.count]
            self.matches = known == name
            if self.matches:
                return choice
        return Choice.ONCE

    def value_of(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor; None if none is known."""
        known = self._values.get(memory_of(tensor)) if tensor.layout is torch.strided else None
        return None if known is None else known[1].get(_place(tensor))

    def call(self, function: Callable[..., Any], args: Any, named: Any, *, is_in_place: bool = False) -> Call:
        """Return a call, with values in the place of tensors."""
        is_trained = is_detached = False

        def value(tensor: Tensor) -> Value:
            nonlocal is_trained, is_detached
            known = self.value_of(tensor)
            if known is None:
                known = Value.of(tensor)
                if tensor.layout is torch.strided:
                    known.is_trained = memory_of(tensor) in self.trained
                    self._others.setdefault(memory_of(tensor), []).append(weakref.ref(known))
            elif known.is_detached and torch.is_grad_enabled():
                known.keep(tensor)
            if known.is_trained:
                is_trained = True
                is_detached |= not (tensor.requires_grad and torch.is_grad_enabled())
            return known

        call = Call(function, *tree_map_only(Tensor, value, (args, named)), is_in_place=is_in_place)
        call.is_trained, call.is_detached = is_trained, is_detached
        return call

    def _values_of(self, tensor: Tensor) -> dict[Any, Value]:
        storage, key = tensor.untyped_storage(), memory_of(tensor)
        if key not in self._values:
            values = self._values

            def forget(_: object) -> None:
                values.pop(key, None)

            values[key] = weakref.ref(storage, forget), {}
        return self._values[key][1]

    def overwrite(self, written: Any) -> None:
        """Forget the values in the memory of tensors that are about to be written; kept ones get their own.

        So do operands of earlier forward passes of which gradients are still to be computed.
        """
        for tensor in tree_leaves(written):
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            values = self._values_of(tensor)
            with _lock:
                others = [known() for tape in _tapes for known in tape._others.pop(memory_of(tensor), ())]
            for value in (*values.values(), *others):
                if value is not None and value.tensor is not None and value.is_unchanged():
                    value.tensor, value.version = value.tensor.clone(), None
            values.clear()


_tapes = weakref.WeakSet[Tape]()  # of all threads, and of all graphs whose gradients may be computed
_recording = 0  # of them
_lock = threading.Lock()


def _count_tapes(more: int) -> None:
    """Have convolutions and norms, which report to tapes, ask for other modes only while a tape records."""
    global _recording
    with _lock:
        before, _recording = _recording, _recording + more
        if not (before and _recording):
            set_dispatch_modes(_modes_beside_a_tape if _recording else torch._C._len_torch_dispatch_stack)


def _modes_beside_a_tape() -> int:
    """Return how many dispatch modes of this thread have to see calls of convolutions and norms."""
    return torch._C._len_torch_dispatch_stack() - (_this_thread.tape is not None)


def unseen() -> AbstractContextManager[object]:
    """Return a context in which the tape that records, if any, sees no calls of PyTorch's dispatcher."""
    return nullcontext() if _this_thread.tape is None else torch._C._DisableTorchDispatch()


def note(y: Tensor, name: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Tell the tape that records, if any, that function(*arguments) has computed y out of its sight."""
    tape = _this_thread.tape
    if tape is not None and y.nbytes >= LEAST_BYTES:
        tape.note_unseen(y, name, function, arguments)


def overwrite(*written: Tensor) -> None:
    """Tell the tape that records, if any, that these tensors are about to be written out of its sight."""
    tape = _this_thread.tape
    if tape is not None:
        tape.overwrite(written)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _is_large(result: Any) -> bool:
    """Return whether a result of an operator is a tensor that the tape knows."""
    return isinstance(result, Tensor) and result.layout is torch.strided and result.nbytes >= LEAST_BYTES


def memory_of(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor."""
    return int(tensor.untyped_storage()._cdata)
