"""Guards: what a graph has read of its model, which must still hold when the graph runs in place of the model.

They check what torch.compile's guards check (modules, attributes, parameters, hooks), for all that is reachable from
the model, and the bytes of its tensors, since writes through ``.data``, NumPy, DLPack or another process do not change
a tensor's version. Of each tensor some bytes are compared in each call, at places that move from call to call.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from mucudnn.core.errors import raise_interruption, tolerated
from mucudnn.running.eager.hot_path import is_plain
from mucudnn.tuning.model_state import (
    CONTAINERS,
    attributes,
    entries_of,
    has_attributes,
    items,
    layout,
    reachable,
    slots,
)

try:
    from mucudnn.graph import _guards
except ImportError:  # not built
    _guards = None  # type: ignore[assignment]

_CHUNK_BYTES, _PARTS, _WHOLE_CHUNKS = 128, 512, 512  # as in _guards.cpp

# Attributes that a forward pass does not read, that are empty where ``_forward_hooks`` is, or that torch itself sets.
_UNREAD = {
    *("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    *("_load_state_dict_post_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "num_batches_tracked"),
    *("__init__", "__setstate__", "__annotate__", "manual_seed", "_is_torch_compile", "_compiled_call_impl"),
}
_NAMESPACES = {"torch": vars(torch), "torch.nn.functional": vars(nn.functional)}  # whose functions users replace
_TABLES = {"_modules", "_parameters", "_buffers", "_forward", "_forward_pre", ""}
_MISSING = object()


class Guards:
    """A model as it was when this object was made.

    tensors: all that are reachable from it. unguarded: the names of those whose values cannot be watched. kept: what
    calls of the model may assign, as in ``Captured``.
    """

    def __init__(self, model: nn.Module, kept: Sequence[tuple[Any, str, Any]] = ()) -> None:
        self.unguarded: list[str] = []
        self._turn = 0
        self._objects: list[Any] = []
        self._with_slots: list[tuple[str, Any, dict[str, Any]]] = []
        containers: list[tuple[str, Any]] = []
        tensors: list[tuple[str, Tensor]] = []
        for name, one in reachable(model, unread=_UNREAD):
            if isinstance(one, np.ndarray) and not one.dtype.hasobject:
                tensors += [(name, _bytes_of(one))] * (one.size > 0)
            elif isinstance(one, Tensor) and is_plain(one):
                tensors.append((name, one))
            elif isinstance(one, (Tensor, np.ndarray)):
                self.unguarded.append(_part(name))
            elif isinstance(one, CONTAINERS):
                containers.append((name, one))
            elif has_attributes(one):
                self._objects.append(one)
                containers.append((name, getattr(one, "__dict__", {})))
                if slots(one):
                    self._with_slots.append((name, one, attributes(one)))
        containers += _NAMESPACES.items()
        self._kinds = list(map(type, self._objects))
        classes = list(dict.fromkeys(chain(*(kind.__mro__[:-1] for kind in (*self._kinds, Tensor)))))
        self._owners = [one for _, one in containers] + classes
        containers += ((f"class {kind.__qualname__}", vars(kind)) for kind in classes)
        self._container_names, self._live = [name for name, _ in containers], [one for _, one in containers]
        numbers = {id(of): number for number, of in enumerate(self._live)}
        self._kept = [
            (items(owner), numbers[id(items(owner))], key) for owner, key, _ in kept if id(items(owner)) in numbers
        ]
        self._note([one.copy() for one in self._live])
        self._scalars = [  # alone can compare equal to another tensor
            (of, key, value)
            for of in self._live
            if isinstance(of, dict)
            for key, value in of.items()
            if isinstance(value, Tensor) and value.numel() == 1 and key not in _UNREAD
            if not any(of is live and key == name for live, _, name in self._kept)
        ]
        self._names = [_part(name) for name, _ in tensors]
        self.tensors = tuple(one for _, one in tensors)
        self._tensors: Any = None
        if _guards is not None and all(one.device.type == "cpu" for one in self.tensors):
            with suppress(AttributeError, ValueError):  # torch lacks the version of DLPack
                self._tensors = _guards.Tensors(Tensor.__dlpack_c_exchange_api__, Tensor._version, self.tensors)
        if self._tensors is None:
            self._tensors = _TensorsInPython(self.tensors)
        self._settings = _settings()

    def why_not(self) -> str | None:
        """Return what is not as it was, as a sentence; None if no change was found."""
        self._turn += 1
        changed = self._tensors.changed(self._turn)
        if changed >= 0:
            return f"the values of {self._names[changed]} have changed"
        if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
            return "a hook for all modules is registered, which a graph does not call"
        if self._settings != _settings():
            return "the default dtype or device of new tensors has changed"
        for live, number, key in self._kept:
            self._copies[number].pop(key, None)
            if key in live:
                self._copies[number][key] = live[key]
        try:
            are_same = self._are_same() and all(of.get(key) is tensor for of, key, tensor in self._scalars)
            if are_same and not (self._with_slots and self._have_other_slots()):
                return None
        except Exception as error:  # what was assigned may raise anything when it is compared, as arrays do
            raise_interruption(error)
        containers = [one.copy() for one in self._live]
        why = self._difference(containers)
        if why is None:
            self._note(containers)  # what has changed is not read, such as a module that torch has loaded
        return why

    def _have_other_slots(self) -> bool:
        return any(True for _, one, noted in self._with_slots for _ in _differences(attributes(one), noted))

    def _note(self, copies: list[Any]) -> None:
        self._copies = copies
        self._are_same: Callable[[], bool] = self._are_same_in_python
        if _guards is not None:
            self._are_same = _guards.Containers(self._objects, self._owners, copies).are_same

    def _are_same_in_python(self) -> bool:
        return list(map(type, self._objects)) == self._kinds and self._live == self._copies

    def _difference(self, containers: list[Any]) -> str | None:
        for one, kind in zip(self._objects, self._kinds, strict=True):
            if type(one) is not kind:
                return f"a {kind.__name__} has become a {type(one).__name__}"
        of_slots = ((name, attributes(one), noted) for name, one, noted in self._with_slots)
        for name, live, noted in chain(zip(self._container_names, containers, self._copies, strict=True), of_slots):
            for key in _differences(live, noted):
                if key in _UNREAD:
                    continue
                if name.endswith("_hooks"):
                    return f"{_part(name.rpartition('_')[0]) or 'the model'} has hooks, which a graph does not call"
                if not (name in _NAMESPACES or (name.startswith("class ") and str(key).startswith("__"))):
                    return f"{_part(f'{name}.{key}')} has changed"
                both = noted.get(key), live.get(key) if name not in _NAMESPACES else None
                if any(map(callable, both)):
                    return f"{name}.{key} has been replaced"
        return None


def replaced_function() -> str | None:
    """Return the name of a function that torch or ``torch.nn.functional`` has from others; None if all are its own.

    Tracers call it more than once: PyTorch's own functions refer to what is under their names.
    """
    own = {"torch", "typing", "typing_extensions", "warnings"}
    functions = (
        (f"{name}.{key}", value.__globals__["__name__"])
        for name, namespace in _NAMESPACES.items()
        for key, value in namespace.items()
        if isinstance(value, FunctionType)
    )
    return next((name for name, module in functions if module.partition(".")[0] not in own), None)


def has_kept(kept: Iterable[tuple[Any, str, Any]]) -> bool:
    """Return whether the model has what its first call made: equal values, not the same objects."""
    return all(_are_equal(items(owner).get(key, _MISSING), value) for owner, key, value in kept)


def _are_equal(value: Any, other: Any) -> bool:
    (leaves, spec), (others, other_spec) = tree_flatten(value), tree_flatten(other)
    if spec != other_spec or list(map(type, leaves)) != list(map(type, others)):
        return False
    return all(
        one.dtype == of_other.dtype and torch.equal(one, of_other) if isinstance(one, Tensor) else one == of_other
        for one, of_other in zip(leaves, others, strict=True)
    )


def _part(name: str) -> str:
    """Return the name of a part of a model as users write it.

    >>> _part("features._modules.0._parameters.weight")
    'features.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _TABLES)


def _differences(live: Any, noted: Any) -> Iterator[Any]:
    """Yield the keys of a dictionary, or the numbers of elements, whose values differ."""
    live, noted = map(entries_of, (live, noted))
    for key in {**noted, **live}:
        one, other = live.get(key, _MISSING), noted.get(key, _MISSING)
        is_same = one is other
        if not (is_same or isinstance(one, Tensor) or isinstance(other, Tensor)):
            with tolerated(Exception):  # as arrays raise
                is_same = bool(one == other)
        if not is_same:
            yield key


# Tensors and settings


class _TensorsInPython:
    """Tensors as they were when this object was made: the Python version of ``_guards.Tensors``, for every device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.layouts, self.versions = tensors, list(map(layout, tensors)), list(map(_version, tensors))
        self.chunks = [_chunks(one) for one in tensors]
        self.suspects: set[int] = set()
        self.are_few = sum(map(len, self.chunks)) <= _WHOLE_CHUNKS

    def changed(self, turn: int) -> int:
        """Return the number of a tensor that is not as it was; -1 if no change was found.

        Compares some bytes of each, all if its version has changed or if all are small; on another device than the CPU,
        of one in turn.
        """
        for number, (tensor, noted) in enumerate(zip(self.tensors, self.chunks, strict=True)):
            if layout(tensor) != self.layouts[number]:
                return number
            version = _version(tensor)
            is_whole = version != self.versions[number] or number in self.suspects or self.are_few
            if not is_whole and tensor.device.type != "cpu" and turn % len(self.tensors) != number:
                continue
            step = 1 if is_whole else min(_PARTS, len(noted))
            first = turn % step
            if _chunks(tensor, first, step) != noted[first::step]:
                self.suspects.add(number)
                return number
            self.suspects.discard(number)
            self.versions[number] = version
        return -1


def _bytes_of(array: Any) -> Tensor:
    """Return a tensor of the bytes of an array, of any dtype and strides, from its first to its last element."""
    steps = [(count - 1) * step for count, step in zip(array.shape, array.strides, strict=True)]
    before, behind = (abs(sum(step for step in steps if (step < 0) is is_back)) for is_back in (True, False))
    memory: Any = (ctypes.c_uint8 * (before + behind + array.itemsize)).from_address(array.ctypes.data - before)
    memory.array = array  # keeps the memory
    return torch.frombuffer(memory, dtype=torch.uint8)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _chunks(tensor: Tensor, first: int = 0, step: int = 1) -> list[int]:
    """Return hashes of every ``step``-th chunk of a tensor's memory, from its first to its last element."""
    memory = tensor.detach().as_strided((extent(tensor.shape, tensor.stride()),), (1,)).view(torch.uint8)
    starts = range(first * _CHUNK_BYTES, len(memory), step * _CHUNK_BYTES)
    return [zlib.crc32(memory[start : start + _CHUNK_BYTES].cpu().numpy().data) for start in starts]


def _settings() -> tuple[object, ...]:
    """Return what new tensors are like if a model does not say it."""
    return torch.get_default_dtype(), torch.get_default_device() if torch._C._len_torch_function_stack() else None


# Memory that results of a model share with its arguments, its own tensors, and each other


@dataclass(frozen=True, slots=True, eq=False)
class ResultMemory:
    """The memory of a result of the model.

    of: the number of an argument, or a tensor of the model, of which it is a view; None for new memory. block: a number
    that results share which are views of the same new memory; None for one that shares nothing. dtype, size, stride: of
    the result. offset: bytes behind the start of the argument, the tensor or the block.
    """

    of: int | Tensor | None
    block: int | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, base: Tensor) -> Tensor:
        """Return the view of a tensor: the tensor itself if it is all of it."""
        is_all = (self.size, self.stride, self.offset) == (tuple(base.shape), base.stride(), 0)
        if base.dtype == self.dtype:
            offset = base.storage_offset() + self.offset // base.itemsize
            return base if is_all else base.as_strided(self.size, self.stride, offset)
        made = torch.empty(0, dtype=self.dtype, device=base.device)
        offset = base.storage_offset() * base.itemsize + self.offset
        made.set_(base.untyped_storage(), offset // made.itemsize, self.size, self.stride)
        return made


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements of the memory from the first to the last element of a tensor.

    >>> extent((2, 3), (10, 1))
    13
    """
    if 0 in size:
        return 0
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def memories_of_results(model: nn.Module, arguments: tuple[Any, ...], own: Sequence[Tensor]) -> dict[int, ResultMemory]:
    """Return the memory of each result that is a tensor, by its number among the leaves of the output.

    own: the model's tensors. The model runs on tensors without values. Raises any error of the model, and
    ``ValueError`` for results that are negated or conjugated lazily.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value

        results = [fake(one) for one in tree_leaves(model(*tree_map(fake, arguments)))]
        known: list[tuple[int | Tensor, Any]] = [(one, fake(one)) for one in own]
        known += enumerate(map(fake, tree_leaves((arguments, {}))))
        bases = {_memory(one): (of, one) for of, one in known if isinstance(one, Tensor)}
        tensors = {number: one for number, one in enumerate(results) if isinstance(one, Tensor)}
        blocks = [_memory(one) for one in tensors.values()]
        found = {}
        for number, one in tensors.items():
            if one.is_neg() or one.is_conj():
                raise ValueError("a result is a view that is negated or conjugated lazily")
            memory, offset = _memory(one), int(one.storage_offset()) * one.itemsize
            of, base = bases.get(memory, (None, None))
            offset -= 0 if base is None else int(base.storage_offset()) * base.itemsize
            block = blocks.index(memory) if base is None and blocks.count(memory) > 1 else None
            found[number] = ResultMemory(of, block, one.dtype, tuple(one.shape), one.stride(), offset)
        return found


def correct_strides(memories: dict[int, ResultMemory], output: Any) -> None:
    """Give new results the strides of a call of the model, which those of tensors without values may differ from."""
    for number, result in enumerate(tree_leaves(output)):
        memory = memories.get(number)
        if memory is not None and memory.of is None and memory.block is None:
            memories[number] = replace(memory, stride=result.stride())


def unshared(
    results: Sequence[Any],
    memories: Mapping[int, ResultMemory],
    leaves: Sequence[Any],
    arena: Tensor,
    own_memory: frozenset[int],
) -> list[Any]:
    """Return results with the model's strides, which share memory exactly where the model's do.

    leaves: the arguments. arena, own_memory: memory that no result may share, the latter by the addresses of storages.
    The arena's storage is not asked for: with a Python object for it, the end of a thread that Python has not started,
    and with it of the thread's workspace, crashes (pybind11 deletes the thread's state twice).
    """
    first, last = arena.data_ptr(), arena.data_ptr() + arena.numel()
    taken = {one.untyped_storage().data_ptr() for one in leaves if isinstance(one, Tensor)} | own_memory
    blocks: dict[int, Tensor] = {}
    views: dict[tuple[object, ...], Tensor] = {}  # the same view is the same tensor
    found = []
    for number, value in enumerate(results):
        memory = memories.get(number)
        if memory is None:
            found.append(value)
            continue
        size, stride = memory.size, memory.stride
        if memory.of is None and memory.block is None:
            storage = None if first <= value.data_ptr() < last else value.untyped_storage().data_ptr()
            if storage is None or storage in taken or value.stride() != stride:
                value = _fill(torch.empty_strided(size, stride, dtype=memory.dtype, device=value.device), value)
                storage = value.untyped_storage().data_ptr()
            taken.add(storage)
            found.append(value)
            continue
        key = id(memory.of), memory.block, memory.dtype, size, stride, memory.offset
        if key not in views and memory.block is not None:
            if memory.block not in blocks:
                of_block = [one for one in memories.values() if one.block == memory.block]
                ends = (one.offset + extent(one.size, one.stride) * one.dtype.itemsize for one in of_block)
                blocks[memory.block] = torch.empty(max(ends), dtype=torch.uint8, device=value.device)
            views[key] = _fill(memory.on(blocks[memory.block]), value)
        elif key not in views:
            base: Any = leaves[memory.of] if isinstance(memory.of, int) else memory.of
            views[key] = memory.on(base)
        found.append(views[key])
    return found


def _fill(result: Tensor, value: Tensor) -> Tensor:
    """Copy a value into a result, once where the result repeats its elements (as ``expand`` does), and return it."""
    once = tuple(slice(None if step else 1) for step in result.stride())
    result[once].copy_(value[once])
    return result


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
