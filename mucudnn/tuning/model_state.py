"""The state of a model: all to which it refers, and how it is put back after runs of the model.

Also a step of a model on a sample input, as a user would run it (``OwnStep``).
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import _lru_cache_wrapper, partial
from itertools import chain
from operator import delitem, setitem
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from mucudnn.core.errors import tolerated
from mucudnn.kernels.memory import is_free
from mucudnn.running.eager.hot_path import is_plain
from mucudnn.running.modules import TunedModule

CONTAINERS = dict, list, set, deque
_OPAQUE = {"torch", "logging", "threading", "weakref", "multiprocessing", "concurrent", "asyncio", "queue", "mucudnn"}
_EMPTY_CELL = CellType()
_MISSING = object()
_OF_TUNING = {
    "__class__",
    "groups",
    "keeping",
    "why_torchs",
    *TunedModule.__annotations__,
}  # attributes that a tuned module keeps

Owners = list[tuple[Any, dict[Any, Any]]]  # containers and objects, each with what it holds by key or name


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
    with tolerated(Exception):  # objects may refuse to be looked at
        attributes(part)
        return True
    return False


def package_of(code: type | FunctionType) -> str:
    return str(code.__module__).partition(".")[0]


def slots(part: Any) -> list[str]:
    """Return the names of an object's attributes that are not in its ``__dict__``; those of Python's own are caches."""
    kinds = [kind for kind in type(part).__mro__ if package_of(kind) not in sys.stdlib_module_names]
    members = [item for kind in kinds if "__slots__" in vars(kind) for item in vars(kind).items()]
    return [name for name, member in members if isinstance(member, MemberDescriptorType) and hasattr(part, name)]


def attributes(part: Any) -> dict[str, Any]:
    """Return a copy of an object's attributes, of which the class is the first."""
    in_slots = {name: getattr(part, name) for name in slots(part)}
    return {"__class__": type(part), **getattr(part, "__dict__", {}), **in_slots}


def items(owner: Any) -> dict[Any, Any]:
    """Return the dictionary of an object's attributes, or the owner if it is a dictionary."""
    return owner if isinstance(owner, dict) else vars(owner)


def entries_of(owner: Any) -> dict[Any, Any]:
    """Return what a container holds by key, number or the element itself, or an object's attributes by name."""
    return {element: element for element in owner} if isinstance(owner, set) else dict(_children(owner))


def _assigned(entries: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries that are not the same objects as before."""
    return {key: value for key, value in entries.items() if before.get(key, _MISSING) is not value}


def additions(owners: Owners) -> list[tuple[Any, str, Any]] | None:
    """Return what has been assigned since: the owner, its key and the value; None if that is not all."""
    new = []
    for owner, before in owners:
        entries = entries_of(owner)
        assigned, removed = _assigned(entries, before), before.keys() - entries.keys()
        is_listed = isinstance(owner, (set, list, deque)) or bool(slots(owner))
        if removed or "__class__" in assigned or (assigned and is_listed):
            return None
        new += [(owner, key, value) for key, value in assigned.items()]
    return new


@contextmanager
def undisturbed(model: nn.Module, *, with_values: bool | None = None) -> Iterator[Owners]:
    """Restore the model and the random states after the block: all attributes, buffers, gradients, modes and hooks.

    What the model refers to is restored too: containers, the values of tensors and arrays, and objects of classes that
    come with the model (others, such as a trainer or a logger, may be at work). The block gets these containers and
    objects. Modules that were tuned in the block stay tuned, unless it raises; lazy modules stay initialized, with new
    running statistics. In the block, autograd is enabled, and the model's gradients start as None.

    with_values: whether the values of parameters are restored, of which copies are kept; None if there is memory.
    """
    packages = {"types", *(package_of(type(module)) for module in model.modules())}

    def belongs(part: Any) -> bool:
        if isinstance(part, nn.Module):
            return not isinstance(part, LazyModuleMixin)
        if isinstance(part, (*CONTAINERS, tuple, frozenset)):
            return True
        return package_of(type(part)) in packages and _may_be_read(part)

    parts = [part for _, part in reachable(model, is_followed=belongs)]
    owners = _owners(part for part in parts if belongs(part))
    parts += (*model.parameters(), *model.buffers())  # ScriptModules do not have theirs in attributes
    if with_values is None:
        plain = [parameter for parameter in model.parameters() if is_plain(parameter)]
        with_values = not plain or is_free(sum(parameter.nbytes for parameter in plain), plain[0].device)
    with ExitStack() as stack:  # in which each is restored, whatever the others raise
        # Random states, values, attributes, modes and gradients, in the reverse order.
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        for part in {id(part): part for part in parts}.values():
            _restore_values_after(stack, part, with_values=with_values)
        for owner, entries in owners:
            stack.callback(put_back, owner, entries)
        for module in model.modules():  # a ScriptModule's mode is no attribute of Python
            stack.callback(_put_back_mode, module, was_training=is_training(module))
            if isinstance(module, LazyModuleMixin):
                stack.callback(_put_back_statistics, module)
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        stack.callback(set_gradients, gradients)
        set_gradients((parameter, None) for parameter, _ in gradients)
        # The block, after which tuned modules stay tuned.
        gpus = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(sorted(gpus)), torch.inference_mode(False), torch.enable_grad():
            yield owners
        for owner, entries in owners:
            if isinstance(owner, TunedModule):
                entries |= {name: value for name, value in attributes(owner).items() if name in _OF_TUNING}


def _restore_values_after(stack: ExitStack, part: Any, *, with_values: bool) -> None:
    """Have the stack restore a generator's state, or the values of an array or tensor.

    with_values: whether the values of parameters are restored, too.
    """
    if isinstance(part, torch.Generator):
        stack.callback(part.set_state, part.get_state())
    elif isinstance(part, np.ndarray) and part.dtype.kind in "biufc":
        stack.callback(_put_back_array, part, part.copy())
    elif isinstance(part, Tensor) and not is_lazy(part):
        with torch._C.DisableTorchFunctionSubclass():
            values = part.detach().clone() if with_values or not isinstance(part, nn.Parameter) else None
            stack.callback(_put_back_tensor, part, part.detach(), values, requires_grad=part.requires_grad)


def _owners(parts: Iterable[Any]) -> Owners:
    """Return the containers and the objects with attributes among these parts, and what they hold."""
    return [(part, entries_of(part)) for part in parts if isinstance(part, CONTAINERS) or has_attributes(part)]


def _put_back_array(array: Any, values: Any) -> None:
    if array.tobytes() != values.tobytes():
        array[...] = values


def _put_back_mode(module: nn.Module, *, was_training: bool) -> None:
    if is_training(module) is not was_training:
        module.training = was_training


def _put_back_statistics(module: Any) -> None:
    """Restore the running statistics that a lazy module had when it was initialized, if it is a norm and has been."""
    if isinstance(module, _NormBase) and not any(map(is_lazy, module.buffers())):
        module.reset_running_stats()


def _put_back_tensor(tensor: Tensor, memory: Tensor, values: Any, *, requires_grad: bool) -> None:
    """Restore a tensor's memory, and the values that this had; None if there is no copy."""
    with torch._C.DisableTorchFunctionSubclass():
        if is_plain(memory) and layout(tensor) != layout(memory):
            tensor.data = memory
        is_same = values is None
        with suppress(Exception):  # some dtypes and layouts cannot be compared
            is_same = is_same or torch.equal(tensor, values)  # writing would raise the version
        if not is_same:
            with suppress(Exception), torch.no_grad():  # of elements that share memory, or of a subclass
                tensor.copy_(values)
        if tensor.is_leaf and tensor.requires_grad is not requires_grad:
            tensor.requires_grad_(requires_grad)


def layout(tensor: Tensor) -> tuple[object, ...]:
    """Return where the elements of a tensor are."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def put_back(owner: Any, entries: dict[Any, Any]) -> None:
    """Restore a container or an object's attributes: only what differs, since writing changes a dictionary's version.

    A dictionary is never empty in between: it may be a module's, which other threads read.
    """
    current = entries_of(owner)
    changed, added = _assigned(entries, current), current.keys() - entries.keys()
    if isinstance(owner, (set, list, deque)):
        if changed or added:
            owner.clear()
            (owner.update if isinstance(owner, set) else owner.extend)(entries.values())
        return
    is_dict = isinstance(owner, dict)
    assign, delete = (setitem, delitem) if is_dict else (object.__setattr__, object.__delattr__)
    for key, value in changed.items():  # the class first, whose descriptors other names may have
        assign(owner, key, value)
    for key in added:
        delete(owner, key)


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
    misses = {value: value.cache_info().misses for value in values if isinstance(value, _lru_cache_wrapper)}
    values += [cached.__wrapped__ for cached in misses]
    functions = [value for value in values if isinstance(value, FunctionType)]
    spaces += [function.__globals__ for function in functions if not _is_opaque(function)]
    beside = reachable(spaces, is_followed=lambda part: isinstance(part, (*CONTAINERS, tuple)))
    owners = _owners(part for _, part in chain(reachable(model), beside))
    changed: list[Any] = []
    try:
        yield changed
    finally:
        for owner, entries in owners:
            if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(entries_of(owner))):
                changed.append(owner)
                put_back(owner, entries)
        for function, before in misses.items():
            if function.cache_info().misses != before:
                changed.append(function)
                function.cache_clear()


def _is_opaque(code: type | FunctionType) -> bool:
    return package_of(code) in _OPAQUE or package_of(code) in sys.stdlib_module_names


# Steps


class OwnStep:
    """A step of a model on one sample input: forward and backward pass in training mode, else the forward pass.

    arguments: the model's only argument, or a tuple of all positional ones. Each differentiable output gets a random
    gradient, drawn once: a gradient of ones would vanish behind a normalization, and zeros may change the time. It is
    copied when the backward pass begins, and freed as soon as it has been read, like that of a loss. Without
    differentiable outputs, the step is the forward pass. Gradients are kept after the step; at the start they are None.

    Raises any error of the model.
    """

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments if isinstance(arguments, tuple) else (arguments,)
        self._gradients: dict[int, Tensor] = {}

    def __call__(self, model: nn.Module) -> None:
        arguments = tree_map(leaf, self.arguments)
        if not is_training(model):
            with torch.no_grad():
                model(*arguments)
            return
        set_gradients((parameter, None) for parameter in model.parameters())
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            torch.clear_autocast_cache()
        output = model(*arguments)
        trained = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
        if trained:
            losses = [_Loss.apply(self._gradient(number, y), y) for number, y in enumerate(trained)]  # type: ignore[no-untyped-call]
            torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])

    def _gradient(self, number: int, y: Tensor) -> Tensor:
        known = self._gradients.get(number)
        if known is None or (known.shape, known.dtype) != (y.shape, y.dtype):
            known = self._gradients[number] = torch.randn_like(y)
        return known


class _Loss(torch.autograd.Function):
    """A scalar with a given gradient of y."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, y: Tensor) -> Tensor:
        ctx.gradient = gradient
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        return None, ctx.gradient.clone()


def leaf(value: Any) -> Any:
    """Return a leaf tensor with the values of an input, so that its gradient is not added to the caller's tensor."""
    if not isinstance(value, Tensor):
        return value
    trainable = value.clone() if value.is_inference() else value.detach()
    return trainable.requires_grad_(value.requires_grad)


def is_training(module: nn.Module) -> bool:
    """Return whether a module is in training mode; what ``torch.jit.freeze`` makes has no mode, and is not."""
    return bool(getattr(module, "training", False))


def set_gradients(gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Assign gradients where they differ: a module may refuse assignments."""
    for parameter, gradient in gradients:
        if parameter.grad is not gradient:
            parameter.grad = gradient
