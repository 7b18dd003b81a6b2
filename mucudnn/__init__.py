"""mucudnn: faster convolutions within a given workspace memory.

Exported names are loaded at their first use, so that ``import mucudnn`` does not load torch. With ``MUCUDNN_ENABLE=1``
in the environment, ``import mucudnn`` has ``enable`` called once torch is loaded.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mucudnn.core import VERSION

if TYPE_CHECKING:
    from mucudnn.core.config import BatchSizePolicy, Config
    from mucudnn.core.errors import (
        BrokenDeviceError,
        DatabaseError,
        InfeasibleError,
        InvalidInputError,
        LibraryError,
        MucudnnError,
        SharingError,
        UnavailableError,
    )
    from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
    from mucudnn.core.records import Configuration, MicroConfig
    from mucudnn.enabling.status import Status
    from mucudnn.enabling.switch import disable, enable, status, tuned
    from mucudnn.graph.windows.raster import run_in_bands
    from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace
    from mucudnn.kernels.registry import register
    from mucudnn.optimizing.curve import largest_batch, step_curve
    from mucudnn.optimizing.optimize import optimize
    from mucudnn.optimizing.report import report
    from mucudnn.running.modules import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
    from mucudnn.running.workspace import release_workspaces
    from mucudnn.tuning.tuner import Tuning, TuningInterrupted, tune

__version__ = VERSION

__all__ = [
    "BaseAlgorithm",
    "BatchSizePolicy",
    "BrokenDeviceError",
    "Config",
    "Configuration",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvProblem",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "DatabaseError",
    "InfeasibleError",
    "InvalidInputError",
    "LibraryError",
    "MemoryFormat",
    "MicroConfig",
    "MucudnnError",
    "Operation",
    "SharingError",
    "Status",
    "Tuning",
    "TuningInterrupted",
    "UnavailableError",
    "Workspace",
    "disable",
    "enable",
    "largest_batch",
    "optimize",
    "register",
    "release_workspaces",
    "report",
    "run_in_bands",
    "status",
    "step_curve",
    "tune",
    "tuned",
]

_MODULES = {
    "enabling.status": ("Status",),
    "enabling.switch": ("disable", "enable", "status", "tuned"),
    "graph.windows.raster": ("run_in_bands",),
    "kernels.algorithm": ("BaseAlgorithm", "Workspace"),
    "kernels.registry": ("register",),
    "core.config": ("BatchSizePolicy", "Config"),
    "core.records": ("Configuration", "MicroConfig"),
    "core.errors": (
        *("BrokenDeviceError", "DatabaseError", "InfeasibleError", "InvalidInputError"),
        *("LibraryError", "MucudnnError", "SharingError", "UnavailableError"),
    ),
    "running.workspace": ("release_workspaces",),
    "optimizing.curve": ("largest_batch", "step_curve"),
    "optimizing.optimize": ("optimize",),
    "optimizing.report": ("report",),
    "running.modules": (
        *("Conv1d", "Conv2d", "Conv3d"),
        *("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"),
    ),
    "core.problem": ("ConvProblem", "MemoryFormat", "Operation"),
    "tuning.tuner": ("Tuning", "TuningInterrupted", "tune"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("MUCUDNN_ENABLE", "0") != "0":
    from mucudnn.core.config import config_from_environment, unknown_variables
    from mucudnn.core.errors import warn
    from mucudnn.enabling.switch import enable_with_torch

    for _sentence in unknown_variables(os.environ):
        warn(_sentence)
    enable_with_torch(lambda: config_from_environment(os.environ))
