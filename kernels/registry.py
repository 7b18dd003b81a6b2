"""Lists every algorithm there is: ours, and those that other packages bring.

A new one of ours is a class in its family's folder and a row here. The contract tests then pick it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from mucudnn.kernels import plug_ins
from mucudnn.kernels.compiled import algorithms as compiled
from mucudnn.kernels.contract.algorithm import Algorithm, AlgorithmSource
from mucudnn.kernels.cudnn import PREFIX
from mucudnn.kernels.plug_ins import PlugIn
from mucudnn.kernels.torch_ops import direct, fft
from mucudnn.kernels.torch_ops.gemm import GEMM, GEMM_ON_CUDA
from mucudnn.kernels.torch_ops.native import DISPATCHED, NATIVE_ALGORITHM, NATIVE_OTHER_FORMAT
from mucudnn.kernels.winograd import algorithms as winograd
from mucudnn.words.errors import InvalidInputError, UnavailableError
from mucudnn.words.results import package_of
from mucudnn.words.values import shown

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
    compiled.LOOP_NEST,
)
_DEVICE_TYPES = ("cpu", "cuda")
_registered: dict[tuple[str, str], Algorithm] = {}  # by device type and name


def register(algorithm: Algorithm) -> None:
    """Let an algorithm take part in tuning and running, beside those that mucudnn has.

    It is measured, compared with float64 at every micro-batch size between guard zones, stored with its version, and
    chosen where it is the fastest. Its name is ``package/name``. It runs on the device type that it names in
    ``device_type``, else on the CPU. ``mucudnn.testing.check_algorithm`` checks it before.

    Registering is for this process, and for those that are forked off it later. Other processes, such as spawned
    workers and the command ``mucudnn``, find the algorithm by an entry point of the group ``mucudnn.algorithms``, which
    names it, or a tuple of several. Registering an equal one again does nothing.

    Raises ``InvalidInputError`` for what is no algorithm, and for a name that is taken or malformed.
    """
    algorithm = plug_ins.require_algorithm(algorithm)
    known = _registered.setdefault((algorithm.device_type, algorithm.name), algorithm)
    if known != algorithm:
        raise InvalidInputError(f"name of an algorithm is {algorithm.name!r}, which {shown(known)} has; choose another")


@cache
def installed_plug_ins() -> tuple[PlugIn, ...]:
    """Return the packages that bring algorithms by entry points. The first call registers what they bring."""
    return plug_ins.load(register)


def algorithms(device_type: str = "cpu") -> tuple[Algorithm, ...]:
    """Return those for a device type that are the same for every problem, torch's own first, other packages' last.

    Raises ``UnavailableError`` for a type that has none.
    """
    return tuple(_every(device_type))


def algorithm_versions(*device_types: str) -> dict[str, int]:
    """Return the version of every algorithm that is the same for every problem, on these device types, or on any."""
    return {one.name: one.version for device_type in device_types or _DEVICE_TYPES for one in algorithms(device_type)}


def as_called(algorithm: Algorithm) -> Algorithm:
    """Return an algorithm on a whole mini-batch. Torch's own is then called as in a user's step."""
    return DISPATCHED if algorithm == NATIVE_ALGORITHM else algorithm


def sources(device_type: str = "cpu") -> tuple[AlgorithmSource, ...]:
    """Return what offers more algorithms, problem by problem. Raises ``UnavailableError`` where there is no cuDNN."""
    if device_type != "cuda":
        return ()
    from mucudnn.kernels.cudnn.algorithms import CudnnEngines

    return (CudnnEngines(cudnn_backend()),)


def cudnn_backend() -> CudnnBackend:
    """Return what executes cuDNN's engines. Raises ``UnavailableError`` where there is no cuDNN."""
    from mucudnn.kernels.cudnn import backend

    return backend.cudnn_backend()


def algorithm(name: str, device_type: str = "cpu") -> Algorithm:
    """Return the algorithm of this name for a device type: one that all problems share, or an engine of cuDNN's.

    Raises ``InvalidInputError`` for an unknown one, and ``UnavailableError`` for a device type that has none, for an
    engine configuration without cuDNN, and for an algorithm of a package that is not here.
    """
    if name.startswith(PREFIX):
        from mucudnn.kernels.cudnn.algorithms import CudnnEngine

        return CudnnEngine.named(name, cudnn_backend())
    for candidate in _every(device_type):
        if candidate.name == name:
            return candidate
    if package_of(name) is not None:
        raise UnavailableError(f"algorithm {name!r} is of a package that is not here: install it, or register it first")
    raise InvalidInputError(f"algorithm is {name!r}; allowed are {_names(a.name for a in _every(device_type))}")


@cache
def _ours(device_type: str) -> tuple[Algorithm, ...]:
    if device_type == "cpu":
        return _CPU
    if device_type not in _DEVICE_TYPES:
        allowed = _names(_DEVICE_TYPES)
        raise UnavailableError(f"no algorithms for device type {device_type!r}; there are some for: {allowed}")
    from mucudnn.kernels.torch_ops.native_cuda import BENCHMARKS, NATIVE_ON_CUDA, NATIVE_OTHER_FORMAT_ON_CUDA

    torchs_own = (NATIVE_ON_CUDA, NATIVE_OTHER_FORMAT_ON_CUDA, *BENCHMARKS)
    return (*torchs_own, GEMM_ON_CUDA, *direct.ON_CUDA, *winograd.ON_CUDA, *fft.ON_CUDA)


def _every(device_type: str) -> Iterator[Algorithm]:
    """Yield ours, then those of other packages, which are not looked for before ours are used up."""
    yield from _ours(device_type)
    installed_plug_ins()
    registered = list(_registered.items())  # another thread may register meanwhile
    yield from (algorithm for (where, _), algorithm in registered if where == device_type)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
