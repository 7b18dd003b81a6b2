"""The registry of all convolution algorithms, both mucudnn's own and those of other packages.

To add an algorithm to mucudnn, write a class in its family's folder and list it here. The contract tests then cover the
new algorithm. Also the names and versions of the libraries that compute on a device.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import torch

from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.records import package_of
from mucudnn.core.values import flag, shown, text, whole
from mucudnn.kernels import frames
from mucudnn.kernels.algorithm import Algorithm, AlgorithmSource, BaseAlgorithm
from mucudnn.kernels.compiled import algorithms as compiled
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.torch_ops import direct, fft, patches
from mucudnn.kernels.torch_ops.gemm import GEMM, GEMM_ON_CUDA
from mucudnn.kernels.torch_ops.native import (
    DISPATCHED,
    NATIVE_ALGORITHM,
    NATIVE_ON_CUDA,
    NATIVE_OTHER_FORMAT,
    NATIVE_OTHER_FORMAT_ON_CUDA,
)
from mucudnn.kernels.winograd import algorithms as winograd

if TYPE_CHECKING:
    from mucudnn.kernels.cudnn.backend import CudnnBackend


_CPU: tuple[Algorithm, ...] = (
    NATIVE_ALGORITHM,
    NATIVE_OTHER_FORMAT,
    GEMM,
    *direct.ALGORITHMS,
    *compiled.ALGORITHMS,
    *winograd.ALGORITHMS,
    *fft.ALGORITHMS,
    patches.PATCHES,
    *frames.ALGORITHMS,
    *winograd.OF_VOLUMES,
    compiled.LOOP_NEST,
)
_DEVICE_TYPES = "cpu, cuda"
_registered: dict[tuple[str, str], Algorithm] = {}  # The keys are device type and name.


def register(algorithm: Algorithm) -> None:
    """Add an algorithm of your own, named ``package/name``, to tuning and running on its ``device_type``.

    At every micro-batch size the algorithm's results are compared with float64, with guard zones around its buffers,
    and its time is measured and stored with its version. The algorithm is chosen where it is the fastest. Check your
    algorithm with ``mucudnn.testing.check_algorithm`` first.

    Registration applies to this process and to processes forked later. Other processes, such as spawned workers and the
    command ``mucudnn``, find algorithms by an entry point of the group ``mucudnn.algorithms``, which names one
    algorithm or a tuple of several. Registering an equal algorithm again does nothing.

    Raises ``InvalidInputError`` if the value is not an algorithm, or its name is taken or malformed.
    """
    algorithm = require_algorithm(algorithm)
    registered = _registered.setdefault((algorithm.device_type, algorithm.name), algorithm)
    if registered != algorithm:
        taken = f"name of an algorithm is {algorithm.name!r}, which {shown(registered)} has"
        raise InvalidInputError(f"{taken}; choose another")


@cache
def installed_plug_ins() -> tuple[PlugIn, ...]:
    """Return the packages that provide algorithms by entry points of the group ``mucudnn.algorithms``.

    The first call also registers their algorithms. A package that cannot be loaded, or provides anything other than
    algorithms, is skipped with a warning.
    """
    plug_ins = []
    for entry_point in entry_points(group=GROUP):
        assert entry_point.dist is not None  # This is for the type checker: entry_points() always sets it.
        package = f"{entry_point.dist.name} {entry_point.dist.version}"
        try:
            loaded = entry_point.load()
            brought = tuple(loaded) if isinstance(loaded, (tuple, list)) else (loaded,)
            for algorithm in brought:
                register(algorithm)
            plug_ins.append(PlugIn(entry_point.dist.name, package, tuple(algorithm.name for algorithm in brought)))
        except (Exception, SystemExit) as raised:  # Third-party code can raise anything.
            error = f"{type(raised).__name__}: {raised}"
            skipped = f"the algorithms of {package} are skipped: {entry_point.value} raised {error}"
            warnings.warn(skipped, RuntimeWarning, stacklevel=2)
            plug_ins.append(PlugIn(entry_point.dist.name, package, error=error))
    return tuple(plug_ins)


def algorithms(device_type: str = "cpu") -> tuple[Algorithm, ...]:
    """Return the algorithms for a device type, except those that a source such as cuDNN lists for each problem.

    Torch's own convolution comes first, algorithms of other packages last. Raises ``UnavailableError`` if the device
    type has none.
    """
    return tuple(_every(device_type))


def as_called(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm to use for an undivided mini-batch.

    For torch's own convolution it makes exactly the call that a user's model makes; others are returned unchanged.
    """
    return DISPATCHED if algorithm == NATIVE_ALGORITHM else algorithm


def sources(device_type: str = "cpu") -> tuple[AlgorithmSource, ...]:
    """Return the ``AlgorithmSource`` objects, such as cuDNN's, which list additional algorithms for each problem.

    Raises ``UnavailableError`` on CUDA without cuDNN.
    """
    if device_type != "cuda":
        return ()
    from mucudnn.kernels.cudnn.algorithms import CudnnEngines

    return (CudnnEngines(cudnn_backend()),)


def cudnn_backend() -> CudnnBackend:
    """Return the backend that executes cuDNN's engines. Raises ``UnavailableError`` if there is no cuDNN."""
    from mucudnn.kernels.cudnn import backend

    return backend.cudnn_backend()


def algorithm(name: str, device_type: str = "cpu") -> Algorithm:
    """Return the algorithm of this name for a device type, which may be an engine configuration of cuDNN.

    Raises ``InvalidInputError`` for an unknown name, and ``UnavailableError`` for a device type without algorithms, for
    an engine configuration without cuDNN, and for an algorithm of a package that is neither installed nor registered.
    """
    if name.startswith("cudnn:"):
        from mucudnn.kernels.cudnn.algorithms import CudnnEngine

        return CudnnEngine.named(name, cudnn_backend())
    for candidate in _every(device_type):
        if candidate.name == name:
            return candidate
    if package_of(name) is not None:
        raise UnavailableError(
            f"algorithm {name!r} is of a package that is not installed; install it, or register the algorithm"
        )
    raise InvalidInputError(f"algorithm is {name!r}; allowed are {', '.join(a.name for a in _every(device_type))}")


@cache
def _ours(device_type: str) -> tuple[Algorithm, ...]:
    if device_type == "cpu":
        return _CPU
    if device_type != "cuda":
        there_are = f"there are algorithms for: {_DEVICE_TYPES}"
        raise UnavailableError(f"no algorithms for device type {device_type!r}; {there_are}")
    from mucudnn.kernels.winograd import cuda as winograd_on_cuda

    return (
        NATIVE_ON_CUDA,
        NATIVE_OTHER_FORMAT_ON_CUDA,
        GEMM_ON_CUDA,
        *direct.ON_CUDA,
        *winograd_on_cuda.ON_CUDA,
        *fft.ON_CUDA,
        patches.PATCHES_ON_CUDA,
        *frames.ON_CUDA,
    )


def _every(device_type: str) -> Iterator[Algorithm]:
    """Yield mucudnn's own algorithms for a device type, then those of other packages.

    Other packages are searched for only when mucudnn's own algorithms have all been yielded.
    """
    yield from _ours(device_type)
    installed_plug_ins()
    registered = list(_registered.items())  # Another thread may register an algorithm meanwhile.
    yield from (algorithm for (where, _), algorithm in registered if where == device_type)


# Algorithms of other packages

GROUP = "mucudnn.algorithms"  # the entry point group
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class PlugIn:
    """An installed package that provides convolution algorithms.

    package: its name and version, such as ``own-algorithm 0.1``.
    algorithms: their names.
    error: why loading the package failed; empty if it is loaded.
    """

    name: str
    package: str
    algorithms: tuple[str, ...] = ()
    error: str = ""


def require_algorithm(value: object) -> Algorithm:
    """Return the value if it is a valid algorithm. Raises ``InvalidInputError`` with the reason if it is not."""
    remedy = "give an instance of a class that inherits from mucudnn.BaseAlgorithm"
    if isinstance(value, type):
        raise InvalidInputError(f"algorithm is the class {value.__name__}; {remedy}")
    if not isinstance(value, BaseAlgorithm):
        raise InvalidInputError(f"algorithm is {shown(value)}; {remedy}")
    inherited = [m for m in ("supports", "step") if getattr(type(value), m) is getattr(BaseAlgorithm, m)]
    if lacking := [*(member for member in ("name", "version") if not hasattr(value, member)), *inherited]:
        raise InvalidInputError(f"algorithm is {shown(value)}, which lacks {', '.join(lacking)}: define them")
    name = text(value.name, "name of an algorithm")
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"name of an algorithm is {shown(name)}; write 'package/name', each of letters, digits, '.', '_' and '-': "
            "databases keep the name, so it must never clash with another package's"
        )
    whole(value.version, f"version of {name}", 1)
    flag(value.deterministic, f"deterministic of {name}")
    if value.device_type not in ("cpu", "cuda"):
        raise InvalidInputError(f"device_type of {name} is {shown(value.device_type)}; allowed are {_DEVICE_TYPES}")
    return value


# Names and versions of libraries, which are part of the key of every measurement


def library_of(device_type: str) -> str:
    """Return the library behind torch's own convolution, such as ``oneDNN 3.12.0`` or, on CUDA, ``cuDNN 9.19.0``.

    Raises ``UnavailableError`` if CUDA is available without cuDNN.
    """
    if device_type == "cuda":
        from mucudnn.kernels.cudnn import library as cudnn

        return f"cuDNN {cudnn.library().version_text}"
    return onednn_version(torch.__config__.show())


def compiler_of(device_type: str) -> str:
    """Return the instruction set of mucudnn's C++ code on the CPU (``avx512``); on CUDA the compiler (``CuPy 14.2``).

    The value ``torch`` means that mucudnn has no compiled code for the device.
    """
    if device_type != "cuda":
        return loaded_build().name
    from mucudnn.kernels.winograd.cupy_launcher import compiler_name

    return compiler_name()


def settings_that_bar() -> tuple[object, ...]:
    """Return the settings of torch that exclude algorithms on CUDA.

    Reading only these settings is ten times faster than ``TorchSettings.current``, which reads all.
    """
    read = torch._C
    repeatable = read._get_cudnn_deterministic(), read._get_deterministic_algorithms()
    return read._get_cudnn_enabled(), read._get_fp32_precision_getter("cuda", "conv"), *repeatable


def onednn_version(torch_config: str) -> str:
    """Parse oneDNN's version, such as ``oneDNN 3.12.0``, from torch's description of its build.

    The description uses oneDNN's former name MKL-DNN.
    """
    match = re.search(r"(?:MKL-DNN|oneDNN) v([\d.]+)", torch_config)
    return f"oneDNN {match.group(1)}" if match else "no oneDNN"
