"""The state of a model: all to which it refers, and how it is put back after runs of the model."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import _lru_cache_wrapper, partial
from itertools import chain
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from mucudnn.core.errors import raise_interruption
from mucudnn.kernels.memory import is_free
from mucudnn.running.eager.hot_path import is_plain
from mucudnn.running.modules import TunedModule
from mucudnn.tuning.own_step import is_training, set_gradients

CONTAINERS = dict, list, set, deque
_OPAQUE = {"torch", "logging", "threading", "weakref", "multiprocessing", "concurrent", "asyncio", "queue", "mucudnn"}
_EMPTY_CELL = CellType()


def reachable(
    root: Any, *, unread: Collection[str] = (), is_followed: Callable[[Any], bool] = lambda part: True
) -> Iterator[tuple[str, Any]]:
    """Yield a model and all to which it refers: modules, other objects, containers and tensors, with their names.

    unread: keys of dictionaries that are not followed.
    """
    seen: dict[int, Any] = {}
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        name, part = left.pop()
        if id(part) in seen or isinstance(part, (str, bytes, int, float, type(None))):
            continue
        seen[id(part)] = part  # held, so that no other object has its id
        yield name, part
        if is_followed(part):
            children = ((key, value) for key, value in _children(part) if not (isinstance(key, str) and key in unread))
            left += ((f"{name}.{key}" if name else str(key), value) for key, value in children)


def _children(part: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(part, dict):
        yield from part.items()
    elif isinstance(part, (list, tuple, set, frozenset, deque)):
        yield from enumerate(part)
    elif isinstance(part, partial):
        yield from enumerate((part.func, part.args, part.keywords))
    elif isinstance(part, MethodType):
        yield "self", part.__self__
    elif isinstance(part, FunctionType):
        yield from enumerate(cell.cell_contents for cell in part.__closure__ or () if cell != _EMPTY_CELL)
    elif has_attributes(part):
        yield from attributes(part).items()


def has_attributes(part: Any) -> bool:
    """Return whether a forward pass may read or assign an object's attributes."""
    if isinstance(part, nn.Module):
        return True
    if isinstance(part, (type, ModuleType, FunctionType, MethodType, partial, Tensor, *CONTAINERS)):
        return False
    if package_of(type(part)) in _OPAQUE:
        return False
    return hasattr(part, "__dict__") or bool(slots(part))


def _may_be_read(part: Any) -> bool:
    try:
        attributes(part)
    except Exception as error:  # objects may refuse to be looked at
        raise_interruption(error)
        return False
    return True


def package_of(code: type | FunctionType) -> str:
    return str(code.__module__).partition(".")[0]


def slots(part: Any) -> list[str]:
    """Return the names of an object's attributes that are not in its ``__dict__``; those of Python's own are caches."""
    kinds = [kind for kind in type(part).__mro__ if package_of(kind) not in sys.stdlib_module_names]
    members = [item for kind in kinds if "__slots__" in vars(kind) for item in vars(kind).items()]
    return [name for name, member in members if isinstance(member, MemberDescriptorType) and hasattr(part, name)]


def attributes(part: Any) -> dict[str, Any]:
    """Return a copy of an object's attributes."""
    return {**getattr(part, "__dict__", {}), **{name: getattr(part, name) for name in slots(part)}}


def items(owner: Any) -> dict[Any, Any]:
    """Return the dictionary of an object's attributes, or the owner if it is a dictionary."""
    return owner if isinstance(owner, dict) else vars(owner)


def entries_of(owner: Any) -> Any:
    """Return a copy of what a container holds, or of an object's attributes."""
    if isinstance(owner, CONTAINERS):
        return dict(owner) if isinstance(owner, dict) else list(owner)
    return attributes(owner)


class ModelState:
    """A model as it was when this object was made: its modules, and what belongs to them.

    These are containers, and objects of classes that come with the model: others, such as a trainer or a logger, may be
    at work. Lazy modules that are not initialized are left out.
    """

    def __init__(self, model: nn.Module) -> None:
        packages = {"types", *(package_of(type(module)) for module in model.modules())}

        def belongs(part: Any) -> bool:
            if isinstance(part, nn.Module):
                return not isinstance(part, LazyModuleMixin)
            if isinstance(part, (*CONTAINERS, tuple, frozenset)):
                return True
            return package_of(type(part)) in packages and _may_be_read(part)

        parts = [part for _, part in reachable(model, is_followed=belongs)]
        own = [part for part in parts if belongs(part)]
        self.kinds = [(part, type(part)) for part in own if isinstance(part, nn.Module)]
        self.owners = [(part, entries_of(part)) for part in own if isinstance(part, CONTAINERS) or has_attributes(part)]
        scripted = chain(model.parameters(), model.buffers())  # ScriptModules do not have theirs in attributes
        initialized = {
            id(part): part for part in chain(parts, scripted) if isinstance(part, Tensor) and not is_lazy(part)
        }
        self.tensors = [*initialized.values()]
        self.arrays = [part for part in parts if isinstance(part, np.ndarray) and part.dtype.kind in "biufc"]
        self.generators = [part for part in parts if isinstance(part, torch.Generator)]

    def added(self) -> list[tuple[Any, str, Any]] | None:
        """Return what has been assigned since: the owner, its key and the value; None if that is not all."""
        found = []
        for owner, entries in self.owners:
            current, before = _identities(entries_of(owner)), _identities(entries)
            if current == before:
                continue
            if not isinstance(entries, dict) or slots(owner) or before.keys() - current.keys():
                return None
            found += [(owner, key, items(owner)[key]) for key in current if current[key] != before.get(key)]
        return found


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[ModelState]:
    """Restore the model and the random states after the block: all attributes, buffers, gradients, modes and hooks.

    What the model refers to is restored too: containers, objects, and the values of tensors and arrays; those of
    parameters only if there is memory for copies. Modules that were tuned in the block stay tuned, unless it raises;
    lazy modules stay initialized, with new running statistics. In the block, autograd is enabled, and the model's
    gradients start as None.
    """
    state, tuned = ModelState(model), set[str]()
    parameters = [parameter for parameter in model.parameters() if is_plain(parameter)]
    has_copies = not parameters or is_free(sum(one.nbytes for one in parameters), parameters[0].device)
    with ExitStack() as stack:  # in which each is restored, whatever the others raise
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        for generator in state.generators:
            stack.callback(generator.set_state, generator.get_state())
        for array in state.arrays:
            stack.callback(_put_back_array, array, array.copy())
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in state.tensors:
                values = tensor.detach().clone() if has_copies or not isinstance(tensor, nn.Parameter) else None
                stack.callback(_put_back_tensor, tensor, tensor.detach(), values, tensor.requires_grad)
        for owner, entries in state.owners:
            stack.callback(put_back, owner, entries, tuned)
        for module, kind in state.kinds:
            stack.callback(_put_back_class, module, kind, tuned)
        for module in model.modules():  # a ScriptModule's mode is no attribute of Python
            stack.callback(_put_back_mode, module, is_training(module))
            if isinstance(module, LazyModuleMixin):
                stack.callback(_put_back_statistics, module)
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        stack.callback(set_gradients, gradients)
        set_gradients((parameter, None) for parameter, _ in gradients)
        gpus = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(sorted(gpus)), torch.inference_mode(False), torch.enable_grad():
            yield state
        tuned.update(TunedModule.__annotations__)


def _put_back_array(array: Any, values: Any) -> None:
    if array.tobytes() != values.tobytes():
        array[...] = values


def _put_back_mode(module: nn.Module, mode: bool) -> None:
    if is_training(module) is not mode:
        module.training = mode


def _put_back_statistics(module: Any) -> None:
    """Restore the running statistics that a lazy module had when it was initialized, if it is a norm and has been."""
    if isinstance(module, _NormBase) and not any(map(is_lazy, module.buffers())):
        module.reset_running_stats()


def _put_back_tensor(tensor: Tensor, memory: Tensor, values: Tensor | None, requires_grad: bool) -> None:
    """Restore a tensor's memory, and the values that this had, if there is a copy."""
    is_same = False
    with torch._C.DisableTorchFunctionSubclass():
        if is_plain(memory):
            if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (memory.data_ptr(), memory.shape, memory.stride()):
                tensor.data = memory
            with suppress(Exception):  # some dtypes cannot be compared
                is_same = values is not None and torch.equal(tensor, values)  # writing would raise the version
        if values is not None and not is_same:
            with suppress(Exception), torch.no_grad():  # of elements that share memory, or of a subclass
                tensor.copy_(values)
        if tensor.is_leaf and tensor.requires_grad is not requires_grad:
            tensor.requires_grad_(requires_grad)


def put_back(owner: Any, entries: Any, tuned: Collection[str] = ()) -> None:
    """Restore a container or an object's attributes. tuned: the names of attributes that a tuned module keeps."""
    current = entries_of(owner)
    if isinstance(owner, TunedModule):
        ours = {name: value for name, value in current.items() if name in tuned}
        entries = {name: value for name, value in entries.items() if name not in tuned} | ours
    if _identities(current) == _identities(entries):  # writing would raise the version of a dictionary
        return
    if isinstance(owner, dict):  # never empty in between: it may be a module's, which other threads read
        for key in current.keys() - entries.keys():
            del owner[key]
        owner.update(entries)
    elif isinstance(owner, set):
        owner.clear()
        owner.update(entries)
    elif isinstance(owner, (list, deque)):
        owner.clear()
        owner.extend(entries)
    else:
        for name in current.keys() - entries.keys():
            object.__delattr__(owner, name)
        for name, value in entries.items():
            object.__setattr__(owner, name, value)


def _identities(entries: Any) -> Any:
    if isinstance(entries, dict):
        return {key: id(value) for key, value in entries.items()}
    return list(map(id, entries))


def _put_back_class(module: nn.Module, kind: type, tuned: Collection[str]) -> None:
    if type(module) is not kind and not (tuned and isinstance(module, TunedModule)):
        object.__setattr__(module, "__class__", kind)


@contextmanager
def free_of_fakes(model: nn.Module) -> Iterator[list[Any]]:
    """After the block, in which a model runs on fake tensors, put back what it has assigned such tensors to.

    That may be anywhere in what the model refers to, in globals beside its code, and in results of ``lru_cache``. The
    list has these containers, objects and functions afterwards.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not _is_opaque(kind)}
    spaces = [vars(sys.modules[kind.__module__]) for kind in kinds if kind.__module__ in sys.modules]
    values = [value for space in (*spaces, *map(vars, kinds)) for value in [*space.values()]]
    values = [value.__func__ if isinstance(value, staticmethod) else value for value in values]
    cached = [value for value in values if isinstance(value, _lru_cache_wrapper)]
    functions = [one for one in (*values, *(one.__wrapped__ for one in cached)) if isinstance(one, FunctionType)]
    spaces += [one.__globals__ for one in functions if not _is_opaque(one)]
    beside = reachable(spaces, is_followed=lambda part: isinstance(part, (*CONTAINERS, tuple)))
    owners = [part for _, part in (*reachable(model), *beside) if isinstance(part, CONTAINERS) or has_attributes(part)]
    noted = [(owner, entries_of(owner)) for owner in owners]
    misses = [one.cache_info().misses for one in cached]
    changed: list[Any] = []
    try:
        yield changed
    finally:
        for owner, entries in noted:
            if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(entries_of(owner))):
                changed.append(owner)
                put_back(owner, entries)
        for function, before in zip(cached, misses, strict=True):
            if function.cache_info().misses != before:
                changed.append(function)
                function.cache_clear()


def _is_opaque(code: type | FunctionType) -> bool:
    return package_of(code) in _OPAQUE or package_of(code) in sys.stdlib_module_names
