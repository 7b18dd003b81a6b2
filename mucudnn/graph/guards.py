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
_OF_FILES = {"save", "load"}  # which ultralytics replaces, and no forward pass calls
_TABLES = {"_modules", "_parameters", "_buffers", "_forward", "_forward_pre", ""}
_MISSING = object()


class Guards:
    """A model as it was when this object was made.

    tensors: all that are reachable from it.
    unguarded: the names of those whose values cannot be watched.
    kept: what calls of the model may assign, as in ``Captured``.
    """

    def __init__(self, model: nn.Module, kept: Sequence[tuple[Any, str, Any]] = ()) -> None:
        self.unguarded: list[str] = []
        self._turn, self._settings = 0, _settings()
        self._objects: list[Any] = []
        self._with_slots: list[tuple[str, Any, dict[str, Any]]] = []
        containers: list[tuple[str, Any]] = []
        tensors: list[tuple[str, Tensor]] = []
        # All to which the model refers
        for name, part in reachable(model, unread=_UNREAD):
            if isinstance(part, np.ndarray) and not part.dtype.hasobject:
                tensors += [(name, _bytes_of(part))] * (part.size > 0)
            elif isinstance(part, Tensor) and is_plain(part):
                tensors.append((name, part))
            elif isinstance(part, (Tensor, np.ndarray)):
                self.unguarded.append(_part(name))
            elif isinstance(part, CONTAINERS):
                containers.append((name, part))
            elif has_attributes(part):
                self._objects.append(part)
                containers.append((name, getattr(part, "__dict__", {})))
                if slots(part):
                    self._with_slots.append((name, part, attributes(part)))
        # Where functions and methods come from
        containers += _NAMESPACES.items()
        self._kinds = list(map(type, self._objects))
        classes = list(dict.fromkeys(chain(*(kind.__mro__[:-1] for kind in (*self._kinds, Tensor)))))
        self._owners = [container for _, container in containers] + classes
        containers += ((f"class {kind.__qualname__}", vars(kind)) for kind in classes)
        self._container_names = [name for name, _ in containers]
        self._live = [container for _, container in containers]
        # What calls may assign
        numbers = {id(container): number for number, container in enumerate(self._live)}
        owners = ((items(owner), key) for owner, key, _ in kept)
        self._kept = [(owner, numbers[id(owner)], key) for owner, key in owners if id(owner) in numbers]
        self._note([container.copy() for container in self._live])
        self._scalars = self._tensors_of_one_number()
        self._names = [_part(name) for name, _ in tensors]
        self.tensors = tuple(tensor for _, tensor in tensors)
        self._tensors = _watched(self.tensors)

    def _tensors_of_one_number(self) -> list[tuple[dict[Any, Any], Any, Tensor]]:
        """Return the dictionaries, keys and values of such tensors, which alone can compare equal to other ones."""
        assigned = {(id(owner), key) for owner, _, key in self._kept}
        scalars = []
        for container in self._live:
            for key, value in container.items() if isinstance(container, dict) else ():
                is_read = key not in _UNREAD and (id(container), key) not in assigned
                if is_read and isinstance(value, Tensor) and value.numel() == 1:
                    scalars.append((container, key, value))
        return scalars

    def check(self) -> str | None:
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
            are_same = self._are_same() and all(owner.get(key) is tensor for owner, key, tensor in self._scalars)
            if are_same and not (self._with_slots and self._have_other_slots()):
                return None
        except Exception as error:  # what was assigned may raise anything when it is compared, as arrays do
            raise_interruption(error)
        containers = [container.copy() for container in self._live]
        why = self._difference(containers)
        if why is None:
            self._note(containers)  # what has changed is not read, such as a module that torch has loaded
        return why

    def _have_other_slots(self) -> bool:
        return any(True for _, part, noted in self._with_slots for _ in _differences(attributes(part), noted))

    def _note(self, copies: list[Any]) -> None:
        self._copies = copies
        self._are_same: Callable[[], bool] = self._are_same_in_python
        if _guards is not None:
            self._are_same = _guards.Containers(self._objects, self._owners, copies).are_same

    def _are_same_in_python(self) -> bool:
        return list(map(type, self._objects)) == self._kinds and self._live == self._copies

    def _difference(self, containers: list[Any]) -> str | None:
        for part, kind in zip(self._objects, self._kinds, strict=True):
            if type(part) is not kind:
                return f"a {kind.__name__} has become a {type(part).__name__}"
        in_slots = ((name, attributes(part), noted) for name, part, noted in self._with_slots)
        for name, live, noted in chain(zip(self._container_names, containers, self._copies, strict=True), in_slots):
            for key in _differences(live, noted):
                why = _change_of(name, key, live, noted)
                if why is not None:
                    return why
        return None


def _change_of(name: str, key: Any, live: Any, noted: Any) -> str | None:
    """Return what another value under a key of a container is, as a sentence; None if a forward pass reads neither."""
    if key in _UNREAD or (name in _NAMESPACES and key in _OF_FILES):
        return None
    if name.endswith("_hooks"):
        return f"{_part(name.rpartition('_')[0]) or 'the model'} has hooks, which a graph does not call"
    if name in _NAMESPACES:
        return f"{name}.{key} has been replaced" if callable(noted.get(key)) else None
    if not (name.startswith("class ") and str(key).startswith("__")):
        return f"{_part(f'{name}.{key}')} has changed"
    is_method = callable(noted.get(key)) or callable(live.get(key))
    return f"{name}.{key} has been replaced" if is_method else None


def replaced_function() -> str | None:
    """Return the name of a function of torch, or a method of ``nn.Module``, that is not PyTorch's; None if all are.

    Tracers call it more than once: PyTorch's own functions refer to what is under their names.
    """
    packages = {"torch", "typing", "typing_extensions", "warnings"}
    functions = (
        (f"{name}.{key}", value.__globals__["__name__"])
        for name, namespace in {**_NAMESPACES, "torch.nn.Module": vars(nn.Module)}.items()
        for key, value in namespace.items()
        if isinstance(value, FunctionType) and key not in _OF_FILES
    )
    return next((name for name, module in functions if module.partition(".")[0] not in packages), None)


def has_kept(kept: Iterable[tuple[Any, str, Any]]) -> bool:
    """Return whether the model has what its first call made: equal values, not the same objects."""
    return all(_are_equal(items(owner).get(key, _MISSING), value) for owner, key, value in kept)


def _are_equal(value: Any, expected: Any) -> bool:
    (leaves, spec), (expected_leaves, expected_spec) = tree_flatten(value), tree_flatten(expected)
    if spec != expected_spec or list(map(type, leaves)) != list(map(type, expected_leaves)):
        return False
    return all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(leaves, expected_leaves, strict=True)
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
        value, before = live.get(key, _MISSING), noted.get(key, _MISSING)
        is_same = value is before
        if not (is_same or isinstance(value, Tensor) or isinstance(before, Tensor)):
            with tolerated(Exception):  # as arrays raise
                is_same = bool(value == before)
        if not is_same:
            yield key


# Tensors and settings


def _watched(tensors: tuple[Tensor, ...]) -> Any:
    """Return what notices that tensors change: in C++, if it was built and all are on the CPU."""
    if _guards is not None and all(tensor.device.type == "cpu" for tensor in tensors):
        with suppress(AttributeError, ValueError):  # torch lacks the version of DLPack
            return _guards.Tensors(Tensor.__dlpack_c_exchange_api__, Tensor._version, tensors)
    return _TensorsInPython(tensors)


class _TensorsInPython:
    """Tensors as they were when this object was made: the Python version of ``_guards.Tensors``, for every device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.layouts, self.versions = tensors, list(map(layout, tensors)), list(map(_version, tensors))
        self.chunks = list(map(_chunks, tensors))
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
    before, behind = -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
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

    base: the number of an argument, or a tensor of the model, of which it is a view; None for new memory.
    block: a number that results share which are views of the same new memory; None for one that shares nothing.
    dtype: of the result, as its size and its stride.
    offset: bytes behind the start of the argument, the tensor or the block.
    """

    base: int | Tensor | None
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
        view = torch.empty(0, dtype=self.dtype, device=base.device)
        offset = base.storage_offset() * base.itemsize + self.offset
        view.set_(base.untyped_storage(), offset // view.itemsize, self.size, self.stride)
        return view


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements of the memory from the first to the last element of a tensor.

    >>> extent((2, 3), (10, 1))
    13
    """
    if 0 in size:
        return 0
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def memories_of_results(
    model: nn.Module, arguments: tuple[Any, ...], models_tensors: Sequence[Tensor]
) -> dict[int, ResultMemory]:
    """Return the memory of each result that is a tensor, by its number among the leaves of the output.

    The model runs on tensors without values. Raises any error of the model, and ``ValueError`` for results that are
    negated or conjugated lazily.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value

        leaves = [fake(leaf) for leaf in tree_leaves(model(*tree_map(fake, arguments)))]
        results = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        # Of which argument, or tensor of the model, each memory is
        bases: list[tuple[int | Tensor, Any]] = [(tensor, fake(tensor)) for tensor in models_tensors]
        bases += enumerate(map(fake, tree_leaves((arguments, {}))))
        by_memory = {_memory(tensor): (base, tensor) for base, tensor in bases if isinstance(tensor, Tensor)}
        blocks = list(map(_memory, results.values()))
        memories = {}
        for number, result in results.items():
            if result.is_neg() or result.is_conj():
                raise ValueError("a result is a view that is negated or conjugated lazily")
            memory, offset = _memory(result), int(result.storage_offset()) * result.itemsize
            base, tensor = by_memory.get(memory, (None, None))
            offset -= 0 if tensor is None else int(tensor.storage_offset()) * tensor.itemsize
            block = blocks.index(memory) if tensor is None and blocks.count(memory) > 1 else None
            memories[number] = ResultMemory(base, block, result.dtype, tuple(result.shape), result.stride(), offset)
        return memories


def correct_strides(memories: dict[int, ResultMemory], output: Any) -> None:
    """Give new results the strides of a call of the model, which those of tensors without values may differ from."""
    for number, result in enumerate(tree_leaves(output)):
        memory = memories.get(number)
        if memory is not None and memory.base is None and memory.block is None:
            memories[number] = replace(memory, stride=result.stride())


def unshared(
    results: Sequence[Any],
    memories: Mapping[int, ResultMemory],
    leaves: Sequence[Any],
    arena: Tensor,
    own_memory: frozenset[int],
) -> list[Any]:
    """Return results with the model's strides, which share memory exactly where the model's do.

    The arena's storage is not asked for: with a Python object for it, the end of a thread that Python has not started,
    and with it of the thread's workspace, crashes (pybind11 deletes the thread's state twice).

    leaves: the arguments.
    arena: memory that no result may share.
    own_memory: the same, by the addresses of storages.
    """
    first, last = arena.data_ptr(), arena.data_ptr() + arena.numel()
    taken = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}
    blocks: dict[int, Tensor] = {}
    views: dict[tuple[object, ...], Tensor] = {}  # the same view is the same tensor
    returned = []
    for number, value in enumerate(results):
        memory = memories.get(number)
        if memory is None:
            returned.append(value)
            continue
        size, stride = memory.size, memory.stride
        if memory.base is None and memory.block is None:
            storage = None if first <= value.data_ptr() < last else value.untyped_storage().data_ptr()
            if storage is None or storage in taken or storage in own_memory or value.stride() != stride:
                value = _fill(torch.empty_strided(size, stride, dtype=memory.dtype, device=value.device), value)
                storage = value.untyped_storage().data_ptr()
            taken.add(storage)
            returned.append(value)
            continue
        key = id(memory.base), memory.block, memory.dtype, size, stride, memory.offset
        if key not in views and memory.block is not None:
            if memory.block not in blocks:
                parts = (view for view in memories.values() if view.block == memory.block)
                ends = (view.offset + extent(view.size, view.stride) * view.dtype.itemsize for view in parts)
                blocks[memory.block] = torch.empty(max(ends), dtype=torch.uint8, device=value.device)
            views[key] = _fill(memory.on(blocks[memory.block]), value)
        elif key not in views:
            base: Any = leaves[memory.base] if isinstance(memory.base, int) else memory.base
            views[key] = memory.on(base)
        returned.append(views[key])
    return returned


def _fill(result: Tensor, value: Tensor) -> Tensor:
    """Copy a value into a result, once where the result repeats its elements (as ``expand`` does), and return it."""
    once = tuple(slice(None if step else 1) for step in result.stride())
    result[once].copy_(value[once])
    return result


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
