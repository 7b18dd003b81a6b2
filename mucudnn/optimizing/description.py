"""A text of what the steps of a model depend on, by which another process finds what was chosen for them.

It has all that a model refers to: modules, attributes, hooks and containers; of tensors their sizes and formats, not
their values; of functions and classes their compiled code, and the globals that it names. Code of Python's library, of
PyTorch, NumPy and mucudnn stands there by its name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mucudnn.core.errors import tolerated
from mucudnn.running.choices import Choices
from mucudnn.running.groups import GroupChoices
from mucudnn.running.modules import TunedModule
from mucudnn.tuning.model_state import attributes, entries_of, has_attributes

_MOST_LINES = 1_000_000  # which are read in seconds
_PLAIN = (
    *(str, bytes, int, float, complex, type(None), type(...), slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_BY_NAME = {"builtins", "torch", "mucudnn", "numpy", *sys.stdlib_module_names}  # packages
_OF_CODE = (
    *("co_code", "co_exceptiontable", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)
_NO_MEMBERS = {"__dict__", "__weakref__", "__doc__", "__annotations__", "__module__"}


def description(*roots: Any) -> tuple[str, str] | None:
    """Return texts that are the same in all processes, and others where steps of a model may be others.

    roots: a model, the input of its steps, and what else they depend on.

    The second text has what was chosen for the model's convolutions, which another tuning may choose otherwise; the
    first one has all else.

    Returns None if there is too much to read, or what cannot be read, such as modules that TorchScript has compiled.
    """
    with tolerated(Exception):  # objects may refuse to be looked at
        reader = _Reader()
        if reader.reads_all([*roots, _settings()]):
            return "\n".join(reader.lines), "\n".join(reader.choices)
    return None


class _Reader:
    """Reads all to which an object refers. Of classes it reads what code that has been read may call, by its name.

    lines: what has been read.
    choices: those of convolutions, each with the number of lines before it.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.choices: list[str] = []
        self._left: list[tuple[str, Any]] = []
        self._seen: dict[int, tuple[int, Any]] = {}  # with the part, so that no other object has its id
        self._names: set[str] = set()
        self._pieces: tuple[str, ...] = ()  # of names that code puts together
        self._waiting: dict[str, list[tuple[str, Any]]] = {}  # members of classes, which no code has named yet

    def reads_all(self, root: Any) -> bool:
        """Read all to which an object refers; return whether that was possible."""
        self._left.append(("", root))
        while self._left:
            name, part = self._left.pop()
            if isinstance(part, _PLAIN):
                self.lines.append(f"{name} {part!r}")
            elif isinstance(part, Choices):
                self.choices.append(f"{len(self.lines)} {_chosen(part)}")
            elif id(part) in self._seen and not isinstance(part, (tuple, frozenset)):  # constants may be one object
                self.lines.append(f"{name} is {self._seen[id(part)][0]}")
            elif isinstance(part, torch.jit.ScriptModule) or len(self.lines) > _MOST_LINES:
                return False
            else:
                self._seen[id(part)] = len(self.lines), part
                self._read(name, part)
        return True

    def _read(self, name: str, part: Any) -> None:
        inside = [*_inside(part)]
        if "_hooks" in name:  # their keys count all hooks of the process
            inside = [("", value) for _, value in inside]
        kind = _untuned(type(part)).__qualname__
        self.lines.append(f"{name} {kind} {_properties(part, inside)} {len(inside)}")
        self._left += inside
        if isinstance(part, type):
            if _is_by_name(part.__module__):  # its own code may call what it has
                self._names.update(dir(part))
            else:
                for member, value in _members(part):
                    self._waiting.setdefault(member, []).append((f"{part.__qualname__}.{member}", value))
        elif isinstance(part, CodeType):
            texts = [constant for constant in part.co_consts if isinstance(constant, str) and constant]
            self._names.update(part.co_names, texts)
            if "getattr" in part.co_names:
                self._pieces = *self._pieces, *texts
        else:
            return
        for member in [member for member in self._waiting if self._is_named(member)]:
            self._left += self._waiting.pop(member)

    def _is_named(self, member: str) -> bool:
        is_special = member.startswith("__") and member.endswith("__")
        return is_special or member in self._names or member.startswith(self._pieces) or member.endswith(self._pieces)


def _settings() -> tuple[Any, ...]:
    """Return the settings of PyTorch that change steps, apart from those that belong to an environment."""
    return (
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        (torch.is_autocast_cache_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
        (torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision(), torch.get_num_threads()),
        torch.get_default_device() if torch._C._len_torch_function_stack() else None,
        (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        [hooks for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_") and "_hooks" in name],
    )


def _untuned(kind: type) -> type:
    """Return the user's class of a class that tuning has derived from it."""
    while "_untuned_class" in vars(kind):
        kind = vars(kind)["_untuned_class"]
    return kind


def _properties(part: Any, inside: list[tuple[str, Any]]) -> str:
    """Return what the text says of a part, beside what is inside."""
    if isinstance(part, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            strides = part.stride() if part.layout is torch.strided else part.layout
            return f"{part.shape} {strides} {part.dtype} {part.device} {part.requires_grad} {part.is_leaf}"
    if isinstance(part, np.ndarray):
        return f"{part.shape} {part.dtype}"
    if isinstance(part, CodeType):
        return str([getattr(part, name) for name in _OF_CODE])
    if isinstance(part, (type, FunctionType)):
        return f"{part.__module__}.{part.__qualname__}"
    return "" if inside else re.sub("0x[0-9a-f]+", "", repr(part))  # without addresses


def _inside(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a part refers to, with names."""
    if isinstance(part, Tensor):
        yield "class", type(part)
        yield "hooks", [*(part._backward_hooks or {}).values(), *(part._post_accumulate_grad_hooks or {}).values()]
    elif isinstance(part, type):
        yield "bases", part.__bases__
        if _is_by_name(part.__module__) and part.__module__ != "builtins":  # users may replace its functions
            yield from ((name, value) for name, value in vars(part).items() if isinstance(value, FunctionType))
    elif isinstance(part, FunctionType):
        yield from _of_function(part)
    elif isinstance(part, CodeType):
        yield "constants", part.co_consts
    elif isinstance(part, GroupChoices):
        yield "choices", (part.defers, part.joins_additions, part.computes_again, part.defers_activations)
        yield "calls", [f"{call!r} {count}" for call, count in part.calls.items()]
    elif isinstance(part, dict):
        for key, value in part.items():
            yield (repr(key), value) if isinstance(key, _PLAIN) else ("", (key, value))
    elif isinstance(part, (set, frozenset)):
        yield from (("", element) for element in sorted(part, key=repr))
    elif isinstance(part, property):
        yield "functions", (part.fget, part.fset)
    elif isinstance(part, (staticmethod, classmethod, MethodType)):
        yield "function", part.__func__
        yield "self", getattr(part, "__self__", None)
    else:
        yield from _of_object(part)


def _chosen(choices: Choices) -> str:
    """Return the digest of what runs, and its workspaces."""
    chosen = [configuration for by_size in choices.configurations.values() for configuration in by_size.values()]
    return f"{choices.handle} {[configuration.workspace_bytes for configuration in chosen]}"


def _of_object(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the elements or attributes of an object, of which the class is the first."""
    entries = entries_of(part)
    if has_attributes(part):
        entries = attributes(part) | {"__class__": _untuned(type(part))}
    if isinstance(part, TunedModule):  # of which tuning assigns what it declares
        kinds = [kind for kind in type(part).__mro__ if _is_by_name(kind.__module__) and issubclass(kind, TunedModule)]
        unread = {*chain.from_iterable(kind.__annotations__ for kind in kinds)}
        entries = {name: value for name, value in entries.items() if name not in unread}
        entries |= {"choices": part.choices} if part.choices is not None else {}
    yield from ((str(name), value) for name, value in entries.items())
    yield "wrapped", getattr(part, "__wrapped__", None)  # by a cache


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class on which steps may depend."""
    for name, value in vars(kind).items():
        is_earlier = name == "__init__" and issubclass(kind, nn.Module)  # than the steps
        if not is_earlier and name not in _NO_MEMBERS:
            yield name, value


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the code of a function, its defaults, what it closes over, and the globals that it names."""
    if _is_by_name(function.__globals__.get("__name__")):
        return
    yield "code", function.__code__
    yield "defaults", (function.__defaults__, function.__kwdefaults__)
    yield from ((str(number), value) for number, value in entries_of(function).items())
    names, spaces = dict.fromkeys(_names(function.__code__)), [function.__globals__]
    for space in spaces:
        for name in names:
            value = space.get(name)
            if not isinstance(value, ModuleType):
                yield name, value
            elif not any(vars(value) is known for known in spaces):
                spaces.append(vars(value))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_by_name(module: object) -> bool:
    return str(module).partition(".")[0] in _BY_NAME
