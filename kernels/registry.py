"""Every algorithm there is. A new one is a file beside this and a row here; the contract tests then pick it up."""

from __future__ import annotations

from collections.abc import Iterable

from mucudnn.errors import InvalidInputError, UnavailableError
from mucudnn.kernels import direct, implicit_gemm, winograd
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.fft import FFT, FFT_TILED
from mucudnn.kernels.gemm import GEMM
from mucudnn.kernels.native import NATIVE_ALGORITHM, NATIVE_OTHER_FORMAT

_CPU: tuple[Algorithm, ...] = (
    NATIVE_ALGORITHM,
    NATIVE_OTHER_FORMAT,
    GEMM,
    *direct.ALGORITHMS,
    *implicit_gemm.ALGORITHMS,
    *winograd.ALGORITHMS,
    FFT,
    FFT_TILED,
)
_BY_DEVICE = {"cpu": _CPU}


def algorithms(device_type: str = "cpu") -> tuple[Algorithm, ...]:
    """All algorithms for a device type, torch's own first. Raises ``UnavailableError`` for a type that has none."""
    if device_type not in _BY_DEVICE:
        raise UnavailableError(
            f"no algorithms for device type {device_type!r}; there are some for: {_names(_BY_DEVICE)}"
        )
    return _BY_DEVICE[device_type]


def algorithm(name: str) -> Algorithm:
    """The algorithm of this name. Raises ``InvalidInputError`` for an unknown one."""
    by_name = {candidate.name: candidate for group in _BY_DEVICE.values() for candidate in group}
    if name not in by_name:
        raise InvalidInputError(f"algorithm is {name!r}; allowed are {_names(by_name)}")
    return by_name[name]


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
