"""Every algorithm there is. A new one is a file beside this and a row here; the contract tests then pick it up."""

from __future__ import annotations

from collections.abc import Iterable

from mucudnn.kernels.compiled import implicit_gemm
from mucudnn.kernels.contract.algorithm import Algorithm, AlgorithmSource
from mucudnn.kernels.cudnn.algorithms import CudnnEngine, CudnnEngines
from mucudnn.kernels.cudnn.backend import cudnn_backend
from mucudnn.kernels.cudnn.engines import PREFIX
from mucudnn.kernels.torch_ops import direct, fft
from mucudnn.kernels.torch_ops.gemm import GEMM, GEMM_ON_CUDA
from mucudnn.kernels.torch_ops.native import NATIVE_ALGORITHM, NATIVE_OTHER_FORMAT
from mucudnn.kernels.torch_ops.native_cuda import BENCHMARKS, NATIVE_ON_CUDA, NATIVE_OTHER_FORMAT_ON_CUDA
from mucudnn.kernels.winograd import algorithms as winograd
from mucudnn.words.errors import InvalidInputError, UnavailableError

_CPU: tuple[Algorithm, ...] = (
    NATIVE_ALGORITHM,
    NATIVE_OTHER_FORMAT,
    GEMM,
    *direct.ALGORITHMS,
    *implicit_gemm.ALGORITHMS,
    *winograd.ALGORITHMS,
    *fft.ALGORITHMS,
)
_CUDA: tuple[Algorithm, ...] = (
    NATIVE_ON_CUDA,
    NATIVE_OTHER_FORMAT_ON_CUDA,
    *BENCHMARKS,
    GEMM_ON_CUDA,
    *direct.ON_CUDA,
    *winograd.ON_CUDA,
    *fft.ON_CUDA,
)
_BY_DEVICE = {"cpu": _CPU, "cuda": _CUDA}


def algorithms(device_type: str = "cpu") -> tuple[Algorithm, ...]:
    """Those for a device type that are the same for every problem, torch's own first.

    Raises ``UnavailableError`` for a type that has none.
    """
    if device_type not in _BY_DEVICE:
        raise UnavailableError(
            f"no algorithms for device type {device_type!r}; there are some for: {_names(_BY_DEVICE)}"
        )
    return _BY_DEVICE[device_type]


def algorithm_versions() -> dict[str, int]:
    """Of every algorithm that is the same for every problem, on any device type."""
    return {algorithm.name: algorithm.version for every in _BY_DEVICE.values() for algorithm in every}


def sources(device_type: str = "cpu") -> tuple[AlgorithmSource, ...]:
    """What offers further algorithms, problem by problem. Raises ``UnavailableError`` where there is no cuDNN."""
    return (CudnnEngines(cudnn_backend()),) if device_type == "cuda" else ()


def algorithm(name: str, device_type: str = "cpu") -> Algorithm:
    """The algorithm of this name for a device type: the same for every problem, or one of cuDNN's engine configurations
    (``cudnn:67 k2=5``).

    Raises ``InvalidInputError`` for an unknown one, ``UnavailableError`` for a type that has none, and for an engine
    configuration without cuDNN.
    """
    if name.startswith(PREFIX):
        return CudnnEngine.named(name, cudnn_backend())
    by_name = {candidate.name: candidate for candidate in algorithms(device_type)}
    if name not in by_name:
        raise InvalidInputError(f"algorithm is {name!r}; allowed are {_names(by_name)}")
    return by_name[name]


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
