"""Classes of tuned modules.

Each of torch's convolution classes has a fixed counterpart. For a subclass that inherits torch's ``forward``, a class
is derived from ours and that subclass, so that a tuned module stays an instance of its class. Pickles name the two base
classes, and unpickling derives the class again.
"""

from __future__ import annotations

import copyreg
from types import new_class
from typing import Any, cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from mucudnn.core.errors import InvalidInputError
from mucudnn.running.modules import Conv1d, Conv2d, ConvTranspose2d, TunedModule

OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: Conv2d,
    nn.Conv1d: Conv1d,
    nn.ConvTranspose2d: ConvTranspose2d,
}
_COMPUTING = ("forward", "_conv_forward", "_output_padding")  # methods that ours override or call
_Class = type[nn.Module]
_made: dict[tuple[_Class, _Class], _Class] = {}  # by our class and the user's
_NOT_COPIED = ("__dict__", "__weakref__")  # class attributes that Python makes itself


def make_tunable(module: nn.Module) -> None:
    """Turn a module of torch into one of mucudnn in place.

    Raises ``InvalidInputError`` if ``why_left_alone`` has a reason.
    """
    module.__class__ = _tuned_class(module)


def why_left_alone(module: nn.Module) -> str | None:
    """Return the reason why a module cannot be turned into one of mucudnn; None if it can or already is one."""
    try:
        made = _tuned_class(module)
        there = object.__new__(type(module))  # a dummy without state, to test whether the class can be changed
        object.__setattr__(there, "__class__", made)
    except InvalidInputError as error:
        return str(error)
    except TypeError as error:
        return f"{type(module).__name__} cannot be changed: {error}"
    return None


def torchs_class(cls: type) -> _Class | None:
    """Return the tunable torch convolution class from which a class derives; None if there is none."""
    return next((torchs for torchs in OURS if issubclass(cls, torchs)), None)


def _tuned_class(module: nn.Module) -> _Class:
    """Return the class for a tuned version of the module. Raises ``InvalidInputError`` if there cannot be one."""
    cls = type(module)
    if issubclass(cls, TunedModule):
        return cls
    if is_parametrized(module):
        return _parametrized(module)
    return _of_class(cls)


def _parametrized(module: nn.Module) -> _Class:
    """Return the class that torch would have made if the module had been tuned before it was parametrized.

    Torch makes a class for each parametrized module, with the parameters as properties, and deletes these properties
    from that class when the parametrization is removed. That fails for a subclass of the class.
    """
    cls, parametrized = type(module), cast(nn.ModuleDict, module.parametrizations)
    before, *others = cls.__bases__
    if others or not all(name in vars(cls) for name in parametrized):
        raise InvalidInputError(f"its parameters are parametrized, and {cls.__name__} is not the class that torch made")
    copied = {name: value for name, value in vars(cls).items() if name not in _NOT_COPIED}
    return type(cls.__name__, (_of_class(before),), {**copied, "_untuned_class": cls})


def _of_class(cls: _Class) -> _Class:
    if issubclass(cls, TunedModule):
        return cls
    torchs = torchs_class(cls)
    if torchs is None:
        raise InvalidInputError(f"{cls.__name__} is not among {', '.join(one.__name__ for one in OURS)}")
    own = (name for name in _COMPUTING if getattr(cls, name, None) is not getattr(torchs, name, None))
    if (name := next(own, None)) is not None:
        raise InvalidInputError(f"{cls.__name__} has a {name} of its own")
    return OURS[torchs] if cls is torchs else _of_both(OURS[torchs], cls)


def _of_both(ours: _Class, users: _Class) -> _Class:
    """Return the class derived from mucudnn's and the user's class, which is made once.

    Raises ``InvalidInputError`` if the user's class cannot be derived from.
    """
    if (ours, users) not in _made:
        _made[ours, users] = _derived(ours, users)
    return _made[ours, users]


def _derived(ours: _Class, users: _Class) -> _Class:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = super(made, self).__reduce_ex__(max(protocol, 2))
        if type(self) is not made or reduced[:2] != (copyreg.__newobj__, (made,)):  # type: ignore[attr-defined]
            return reduced  # the user's class has its own pickling
        return new_tuned, (ours, users), *reduced[2:]

    names = {
        "__doc__": f"A tuned ``{users.__name__}``: see ``mucudnn.{ours.__name__}``.",
        "__module__": users.__module__,
        "__qualname__": f"Tuned{users.__qualname__}",
        "__reduce_ex__": reduce,
        "_untuned_class": users,
    }
    try:
        made: Any = new_class(
            f"Tuned{users.__name__}", (ours, users), exec_body=lambda namespace: namespace.update(names)
        )
    except Exception as error:  # metaclasses and __init_subclass__ may raise anything
        raise InvalidInputError(f"no class can derive from {users.__name__}: {error}") from error
    return cast(_Class, made)


def new_tuned(ours: _Class, users: _Class) -> nn.Module:
    """Return a tuned module without state, for copying and unpickling; pickles refer to this function."""
    made = _of_both(ours, users)
    return made.__new__(made)
