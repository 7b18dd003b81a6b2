"""mucudnn: faster convolutions in the memory there is.

What is exported here is loaded when it is first used: ``import mucudnn`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mucudnn.config import BatchSizePolicy, Config
    from mucudnn.configuration import Configuration, MicroConfig
    from mucudnn.errors import DatabaseError, InfeasibleError, InvalidInputError, MucudnnError, UnavailableError
    from mucudnn.execution import release_workspaces
    from mucudnn.models import optimize, report
    from mucudnn.nn import Conv2d
    from mucudnn.problem import ConvProblem, MemoryFormat, Operation
    from mucudnn.tuner import Tuning, tune

__version__ = "0.1.0"

__all__ = [
    "BatchSizePolicy",
    "Config",
    "Configuration",
    "Conv2d",
    "ConvProblem",
    "DatabaseError",
    "InfeasibleError",
    "InvalidInputError",
    "MemoryFormat",
    "MicroConfig",
    "MucudnnError",
    "Operation",
    "Tuning",
    "UnavailableError",
    "optimize",
    "release_workspaces",
    "report",
    "tune",
]

_MODULES = {
    "config": ("BatchSizePolicy", "Config"),
    "configuration": ("Configuration", "MicroConfig"),
    "errors": ("DatabaseError", "InfeasibleError", "InvalidInputError", "MucudnnError", "UnavailableError"),
    "execution": ("release_workspaces",),
    "models": ("optimize", "report"),
    "nn": ("Conv2d",),
    "problem": ("ConvProblem", "MemoryFormat", "Operation"),
    "tuner": ("Tuning", "tune"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
