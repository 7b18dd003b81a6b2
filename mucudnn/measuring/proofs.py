"""Proofs of foreign code (of other libraries), which runs in a separate process before it may run in this one.

What is asked of that process, a ``Trial`` on a ``Bench``, and what it answers: a ``Proof``, or an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from mucudnn.core.errors import UnsoundError
from mucudnn.core.problem import ConvProblem

MALLOC_DEBUG = "libc_malloc_debug.so.0"  # glibc's checks of blocks from malloc, since 2.34


@dataclass(frozen=True, slots=True)
class Bench:
    """A problem to try candidates on, and the torch settings of the process that requests the trials.

    threads: torch's number of threads. deterministic: see ``deterministic_torch``. limit_s: timeout of a trial in
    seconds. has_bias: whether a bias of zeros is added to y. slow_s: limit for torch's own convolution of the
    mini-batch; if it would take longer, it is only tried on a few samples. Other algorithms have a lower limit
    (``_RIVALS``).
    """

    problem: ConvProblem
    batch_size: int
    device: str
    threads: int
    deterministic: bool
    limit_s: float
    has_bias: bool
    slow_s: float = inf


@dataclass(frozen=True, slots=True)
class Trial:
    """Request to try a candidate in the proving process. pickled: the algorithm, if it cannot be found by its name."""

    bench: Bench
    name: str
    micro_batch_size: int
    pickled: bytes | None = None


class UnprovenError(RuntimeError):
    """Foreign code was not proven safe for a transient reason, such as lack of memory, and is not run."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Error, memory and time of a foreign candidate that ran correctly in the separate proving process.

    relative_error: against float64.
    internal_bytes: bytes that the candidate allocates itself.
    time_s: time of the fastest run, including the heap checks.
    """

    relative_error: float
    internal_bytes: int
    time_s: float


class Fault(StrEnum):
    """Ways in which third-party code fails when a separate process tries it first.

    FAILS: the code raised an error. SLOW: the code takes so long that it was only tried on a few samples.
    """

    DIES = "dies"
    HANGS = "hangs"
    WRONG = "wrong"
    FAILS = "fails"
    SLOW = "slow"


class BarredError(UnsoundError):
    """Foreign code failed in the proving process, so it must not run in this one.

    fault: the way in which it failed.
    least_s: if it was too slow, the seconds that the mini-batch would have taken.
    """

    def __init__(self, reason: str, fault: Fault, least_s: float | None = None) -> None:
        super().__init__(reason, fault, least_s)  # all arguments, for pickling
        self.fault, self.least_s = fault, least_s

    def __str__(self) -> str:
        return str(self.args[0])
