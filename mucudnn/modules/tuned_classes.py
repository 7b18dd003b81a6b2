"""Finds or makes the class that a module has once it is tuned.

For torch's own classes it is ours. For a subclass whose ``forward`` is torch's it is made, of ours and that subclass:
a tuned module stays an instance of its class. Pickles of it name the two classes, and make it again.
"""

from __future__ import annotations

import copyreg
from types import new_class
from typing import Any, cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from mucudnn.modules.conv1d import Conv1d
from mucudnn.modules.conv2d import Conv2d
from mucudnn.modules.conv3d import Conv3d
from mucudnn.modules.conv_transpose2d import ConvTranspose2d
from mucudnn.modules.tuned_module import TunedClass
from mucudnn.words.errors import InvalidInputError

OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: Conv2d,
    nn.Conv1d: Conv1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.Conv3d: Conv3d,
}
_COMPUTING = ("forward", "_conv_forward", "_output_padding")  # methods that ours replace or count on
_Class = type[nn.Module]
_made: dict[tuple[_Class, _Class], _Class] = {}  # by our class and the user's
_NOT_COPIED = ("__dict__", "__weakref__")  # of a class: Python makes them


def make_tunable(module: nn.Module) -> None:
    """Turn a module into one of ours, in place. Raises ``InvalidInputError`` where ``why_left_alone`` has a reason."""
    module.__class__ = _tuned_class(module)


def why_left_alone(module: nn.Module) -> str | None:
    """Say why a module cannot be made one of ours; ``None``: it can, or it is one."""
    try:
        made = _tuned_class(module)
        there = object.__new__(type(module))  # without its state: only to see whether the class can be changed
        object.__setattr__(there, "__class__", made)
    except InvalidInputError as error:
        return str(error)
    except TypeError as error:
        return f"{type(module).__name__} cannot be changed: {error}"
    return None


def torchs_class(cls: type) -> _Class | None:
    """Return the convolution of torch's from which a class derives; ``None``: none of those that can be tuned."""
    return next((torchs for torchs in OURS if issubclass(cls, torchs)), None)


def _tuned_class(module: nn.Module) -> _Class:
    """Find or make the class. Raises ``InvalidInputError`` with the reason why it cannot be."""
    cls = type(module)
    if issubclass(cls, TunedClass):
        return cls
    if is_parametrized(module):
        return _parametrized(module)
    return _of_class(cls)


def _parametrized(module: nn.Module) -> _Class:
    """Make what torch would have made, had the module been tuned before it was parametrized.

    Torch makes a class for each module that it parametrizes, with the parameters as properties, and takes them from
    that class when the parametrization is removed: so a subclass of it does not do.
    """
    cls, parametrized = type(module), cast(nn.ModuleDict, module.parametrizations)
    before, *others = cls.__bases__
    if others or not all(name in vars(cls) for name in parametrized):
        raise InvalidInputError(f"its parameters are parametrized, and {cls.__name__} is not the class that torch made")
    copied = {name: value for name, value in vars(cls).items() if name not in _NOT_COPIED}
    return type(cls.__name__, (_of_class(before),), {**copied, "_untuned_class": cls})


def _of_class(cls: _Class) -> _Class:
    if issubclass(cls, TunedClass):
        return cls
    torchs = torchs_class(cls)
    if torchs is None:
        raise InvalidInputError(f"{cls.__name__} is not among {', '.join(one.__name__ for one in OURS)}")
    own = (name for name in _COMPUTING if getattr(cls, name, None) is not getattr(torchs, name, None))
    if (name := next(own, None)) is not None:
        raise InvalidInputError(f"{cls.__name__} has a {name} of its own")
    return OURS[torchs] if cls is torchs else _of_both(OURS[torchs], cls)


def _of_both(ours: _Class, users: _Class) -> _Class:
    """Make the class of both, once. Raises ``InvalidInputError`` where the user's class cannot be derived from."""
    if (ours, users) not in _made:
        _made[ours, users] = _derived(ours, users)
    return _made[ours, users]


def _derived(ours: _Class, users: _Class) -> _Class:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = super(made, self).__reduce_ex__(max(protocol, 2))
        if type(self) is not made or reduced[:2] != (copyreg.__newobj__, (made,)):  # type: ignore[attr-defined]
            return reduced  # the user's class has a way of its own
        return new_tuned, (ours, users), *reduced[2:]

    names = {
        "__doc__": f"A ``{users.__name__}`` that runs what was chosen for it: see ``mucudnn.{ours.__name__}``.",
        "__module__": users.__module__,
        "__qualname__": f"Tuned{users.__qualname__}",
        "__reduce_ex__": reduce,
        "_untuned_class": users,
    }
    try:
        made: Any = new_class(
            f"Tuned{users.__name__}", (ours, users), exec_body=lambda namespace: namespace.update(names)
        )
    except Exception as error:  # of a metaclass or an __init_subclass__: it may raise anything
        raise InvalidInputError(f"no class can derive from {users.__name__}: {error}") from error
    return cast(_Class, made)


def new_tuned(ours: _Class, users: _Class) -> nn.Module:
    """Make a module without state, which copies and pickles then have: they name this function."""
    made = _of_both(ours, users)
    return made.__new__(made)
