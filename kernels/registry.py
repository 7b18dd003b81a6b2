"""The registry of all convolution algorithms, both mucudnn's own and those of other packages.

To add an algorithm to mucudnn, write a class in its family's folder and list it here. The contract tests then cover the
new algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.records import package_of
from mucudnn.core.values import shown
from mucudnn.kernels import plug_ins
from mucudnn.kernels.compiled import algorithms as compiled
from mucudnn.kernels.contract.algorithm import Algorithm, AlgorithmSource
from mucudnn.kernels.cudnn import PREFIX
from mucudnn.kernels.plug_ins import PlugIn
from mucudnn.kernels.torch_ops import direct, fft
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
    compiled.LOOP_NEST,
)
_DEVICE_TYPES = ("cpu", "cuda")
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
    algorithm = plug_ins.require_algorithm(algorithm)
    known = _registered.setdefault((algorithm.device_type, algorithm.name), algorithm)
    if known != algorithm:
        raise InvalidInputError(f"name of an algorithm is {algorithm.name!r}, which {shown(known)} has; choose another")


@cache
def installed_plug_ins() -> tuple[PlugIn, ...]:
    """Return the packages that provide algorithms by entry points. The first call also registers their algorithms."""
    return plug_ins.load(register)


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
    if name.startswith(PREFIX):
        from mucudnn.kernels.cudnn.algorithms import CudnnEngine

        return CudnnEngine.named(name, cudnn_backend())
    for candidate in _every(device_type):
        if candidate.name == name:
            return candidate
    if package_of(name) is not None:
        raise UnavailableError(
            f"algorithm {name!r} is of a package that is not installed; install it, or register the algorithm"
        )
    raise InvalidInputError(f"algorithm is {name!r}; allowed are {_names(a.name for a in _every(device_type))}")


@cache
def _ours(device_type: str) -> tuple[Algorithm, ...]:
    if device_type == "cpu":
        return _CPU
    if device_type not in _DEVICE_TYPES:
        allowed = _names(_DEVICE_TYPES)
        raise UnavailableError(f"no algorithms for device type {device_type!r}; there are algorithms for: {allowed}")
    from mucudnn.kernels.winograd import cuda_backend

    torchs_own = (NATIVE_ON_CUDA, NATIVE_OTHER_FORMAT_ON_CUDA)
    return (*torchs_own, GEMM_ON_CUDA, *direct.ON_CUDA, *cuda_backend.ON_CUDA, *fft.ON_CUDA)


def _every(device_type: str) -> Iterator[Algorithm]:
    """Yield mucudnn's own algorithms for a device type, then those of other packages.

    Other packages are searched for only when mucudnn's own algorithms have all been yielded.
    """
    yield from _ours(device_type)
    installed_plug_ins()
    registered = list(_registered.items())  # Another thread may register an algorithm meanwhile.
    yield from (algorithm for (where, _), algorithm in registered if where == device_type)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
