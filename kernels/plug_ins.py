"""Finds and validates convolution algorithms that other Python packages provide."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import flag, shown, text, whole
from mucudnn.kernels.contract.algorithm import Algorithm, BaseAlgorithm

GROUP = "mucudnn.algorithms"  # the entry point group
DEVICE_TYPES = ("cpu", "cuda")

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class PlugIn:
    """An installed package that provides convolution algorithms.

    algorithms: names of the package's algorithms. error: why loading the package failed; empty if it is loaded.
    """

    name: str
    version: str
    algorithms: tuple[str, ...] = ()
    error: str = ""

    @property
    def package(self) -> str:
        """Name and version of the package, such as ``own-algorithm 0.1``."""
        return f"{self.name} {self.version}"


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
    if value.device_type not in DEVICE_TYPES:
        allowed = ", ".join(DEVICE_TYPES)
        raise InvalidInputError(f"device_type of {name} is {shown(value.device_type)}; allowed are {allowed}")
    return value


def load(register: Callable[[Algorithm], None]) -> tuple[PlugIn, ...]:
    """Register the algorithms of installed packages, found by their entry points in the group ``mucudnn.algorithms``.

    A package that cannot be loaded, or provides anything other than algorithms, is skipped with a warning.
    """
    return tuple(_load(entry_point, register) for entry_point in entry_points(group=GROUP))


def _load(entry_point: EntryPoint, register: Callable[[Algorithm], None]) -> PlugIn:
    distribution = entry_point.dist
    assert distribution is not None  # This is for the type checker: entry_points() always sets it.
    brings = partial(PlugIn, distribution.name, distribution.version)
    try:
        loaded = entry_point.load()
        algorithms = tuple(loaded) if isinstance(loaded, (tuple, list)) else (loaded,)
        for algorithm in algorithms:
            register(algorithm)
    except (Exception, SystemExit) as error:  # Third-party code can raise anything.
        broken = brings(error=f"{type(error).__name__}: {error}")
        warnings.warn(
            f"the algorithms of {broken.package} are skipped: {entry_point.value} raised {broken.error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return broken
    return brings(tuple(algorithm.name for algorithm in algorithms))
