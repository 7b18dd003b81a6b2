"""Records of the main line: a task, its measurements and failures, configurations, and comparisons of whole calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Self

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import MOST_SAMPLES, ConvProblem
from mucudnn.core.statistics import uncertainty
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import flag, instance, plain, settle, several, text, whole

# Largest load at which a measurement is trusted. An idle desktop takes 5 % of a core, kernel ticks blur the reading by
# as much, and lasting disturbances take a third or more.
BUSY = 0.15


def source_of(algorithm: str) -> str:
    """Return the source of an algorithm: ``library`` for ``library:67 k2=5`` of a library, else the name itself."""
    return algorithm.partition(":")[0]


def package_of(algorithm: str) -> str | None:
    """Return the package of a plug-in algorithm, ``own`` for ``own/pointwise``; None for mucudnn's algorithms."""
    package, slash, _ = algorithm.partition("/")
    return package if slash else None


def is_busy(load: float | None) -> bool:
    """Whether the load (lost fraction of speed) makes a measurement doubtful; an unknown load does not."""
    return load is not None and load > BUSY


@dataclass(frozen=True, slots=True, order=True)
class Environment:
    """Machine and software of a measurement: part of its key, since times differ between machines.

    device: CPU model or GPU name.
    capability: instruction set that torch uses (``AVX512``), or the GPU's (``sm90``).
    threads: torch's number of threads; 1 on a GPU.
    torch: version of torch (``2.13.0+cpu``).
    library: version of its library (``oneDNN 3.12.0``), and whether the C library's heap is another than the kept one
    in which candidates are timed (measuring/heap.py).
    compiled: loaded build of mucudnn's C++ code (``avx512``, ``avx2``, ``plain``), the CUDA compiler on a GPU (``CuPy
    14.2.0``), or ``torch`` if there is neither.
    numerics: ``TorchSettings`` as text; empty on the CPU.
    """

    device: str
    capability: str
    threads: int
    torch: str
    library: str
    compiled: str
    numerics: str = ""

    @property
    def device_type(self) -> str:
        """Type of the device: ``cpu`` or ``cuda``."""
        return "cuda" if self.numerics else "cpu"

    def __str__(self) -> str:
        """Return text such as ``AMD EPYC (AVX512), 2 threads, torch 2.13.0, oneDNN 3.12.0, compiled for avx512``."""
        device, versions = f"{self.device} ({self.capability})", f"torch {self.torch}, {self.library}"
        if self.device_type == "cuda":
            return ", ".join((device, versions, *([] if self.compiled == "torch" else [self.compiled]), self.numerics))
        threads = f"{self.threads} thread" + ("" if self.threads == 1 else "s")
        build = "nothing compiled" if self.compiled == "torch" else f"compiled for {self.compiled}"
        return f"{device}, {threads}, {versions}, {build}"


@dataclass(frozen=True, slots=True, order=True)
class MicroConfig:
    """One algorithm with one micro-batch size (number of samples): the unit that is measured.

    Raises ``InvalidInputError`` for an invalid name or number of samples.
    """

    algorithm: str
    micro_batch_size: int

    def __post_init__(self) -> None:
        settle(
            self,
            algorithm=text(self.algorithm, "algorithm"),
            micro_batch_size=whole(self.micro_batch_size, "micro_batch_size", 1),
        )


@dataclass(frozen=True, slots=True)
class Task:
    """A problem (one operation of a convolution) to tune, with batch size, workspace limit and number of occurrences.

    limit_bytes: largest workspace, inclusive; None if unlimited.
    count: number of occurrences in the network.
    name: text that is shown in progress, errors and accounts.
    in_headroom: whether the limit is the memory free below the peak of a training step; then torch's own convolution
    always fits by definition, and the workspace is allocated for each call.
    baseline_exempt: whether torch's own convolution may exceed the limit.

    Raises ``InvalidInputError`` for other values, for batches of more than ``MOST_SAMPLES``.
    """

    problem: ConvProblem
    batch_size: int
    limit_bytes: int | None = None
    count: int = 1
    name: str = ""
    in_headroom: bool = False
    baseline_exempt: bool = False

    def __post_init__(self) -> None:
        settle(
            self,
            problem=instance(ConvProblem, self.problem, "problem"),
            batch_size=whole(self.batch_size, "batch_size", 1, MOST_SAMPLES),
            limit_bytes=None if self.limit_bytes is None else whole(self.limit_bytes, "limit_bytes"),
            count=whole(self.count, "count", 1),
            name=text(self.name, "name"),
            in_headroom=flag(self.in_headroom, "in_headroom"),
            baseline_exempt=flag(self.baseline_exempt, "baseline_exempt"),
        )

    @property
    def baseline(self) -> MicroConfig:
        """Torch's own convolution with the undivided batch, to which configurations are compared."""
        return MicroConfig(TORCHS_OWN, self.batch_size)

    def __str__(self) -> str:
        return self.name or str(self.problem)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The costs of a micro-config on one problem in seconds and bytes, and its relative error against float64.

    A micro-config is an algorithm and a micro-batch size. setup_s (open and close, once a call) and prepared_bytes
    belong to the algorithm, step_s and scratch_bytes to each micro-batch. Times are medians of the samples, or of fewer
    than three of a step the fastest.

    noise: IQR / median of the step samples.
    load: fraction of the machine's speed lost to other work, limits or slow clocks, from 0 to 1; None if unknown.
    setup_samples_s: samples of a new measurement, in chronological order; empty for one from the database.
    step_samples_s: the same of the steps.
    """

    micro_config: MicroConfig
    setup_s: float
    step_s: float
    prepared_bytes: int
    scratch_bytes: int
    relative_error: float
    noise: float = 0.0
    samples: int = 1
    load: float | None = None
    setup_samples_s: tuple[float, ...] = field(default=(), compare=False, repr=False)
    step_samples_s: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine was busy with something else during the measurement."""
        return is_busy(self.load)


def allowed(measurements: Iterable[Measurement], error_bound: float) -> list[Measurement]:
    """Return the measurements with errors within the bound, and torch's own, which would run without mucudnn."""
    return [m for m in measurements if m.relative_error <= error_bound or m.micro_config.algorithm == TORCHS_OWN]


class FailureKind(StrEnum):
    """Why a micro-config was not measured.

    Transient failures (``OUT_OF_MEMORY``, ``UNPROVEN``) are not stored and are tried again. The last three could run,
    but were passed over.

    FAILED: it raised an error, was wrong, died or hung, and would do so again.
    SLOW: it takes too long to be measured.
    UNPROVEN: foreign code could not be tried in a separate process.
    TOO_LARGE: its workspace exceeds the limit; it may fit another one.
    HOPELESS: too slow in similar problems.
    TOO_MANY_FLOPS: too slow for its number of operations alone; it may win if higher rates are measured.
    """

    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    SLOW = "slow"
    OUT_OF_MEMORY = "out of memory"
    UNPROVEN = "unproven"
    TOO_LARGE = "too large"
    HOPELESS = "hopeless"
    TOO_MANY_FLOPS = "too many FLOPs"


@dataclass(frozen=True, slots=True)
class Failure:
    """A micro-config (algorithm and micro-batch size) that was not measured, and the reason.

    needed_bytes: the workspace of one that was too large; None if there was another reason.
    least_s: seconds of the whole mini-batch, extrapolated from a few samples, of one that was too slow to be measured;
    None otherwise.
    """

    micro_config: MicroConfig
    reason: str
    kind: FailureKind = FailureKind.FAILED
    needed_bytes: int | None = None
    least_s: float | None = None

    @property
    def is_lasting(self) -> bool:
        """Whether it would be the same again; other failures are not stored."""
        return self.kind not in (FailureKind.OUT_OF_MEMORY, FailureKind.UNPROVEN)

    @property
    def is_passed_over(self) -> bool:
        """Whether the micro-config did not fail but was skipped, and may be measured where nothing else fits."""
        return self.kind in (FailureKind.TOO_LARGE, FailureKind.HOPELESS, FailureKind.TOO_MANY_FLOPS)

    @property
    def why(self) -> str:
        """The reason why the micro-config was not measured, marked if it was skipped."""
        return f"passed over: {self.reason}" if self.is_passed_over else self.reason


@dataclass(frozen=True, slots=True)
class Configuration:
    """Micro-configs (each an algorithm and a micro-batch size) that cover a mini-batch, in the order in which they run.

    Equal algorithms are adjacent, larger micro-batches first.

    time_s: predicted time, the sum of setups and steps.
    workspace_bytes: the sum of prepared bytes and the largest scratch.

    Raises ``InvalidInputError`` for elements that are not micro-configs. Costs are checked by the solver.

    >>> parts = (MicroConfig("winograd-4x4", 8), MicroConfig("winograd-4x4", 8), MicroConfig("gemm", 2))
    >>> configuration = Configuration(parts, time_s=0.0031, workspace_bytes=2_400_000)
    >>> configuration.batch_size
    18
    >>> print(configuration)
    winograd-4x4 8×2 + gemm 2
    """

    micro_configs: tuple[MicroConfig, ...]
    time_s: float
    workspace_bytes: int

    def __post_init__(self) -> None:
        settle(
            self,
            micro_configs=tuple(instance(MicroConfig, part, "micro_config") for part in several(self.micro_configs)),
            time_s=plain(self.time_s),
            workspace_bytes=plain(self.workspace_bytes),
        )

    @property
    def batch_size(self) -> int:
        return sum(m.micro_batch_size for m in self.micro_configs)

    @property
    def algorithms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m.algorithm for m in self.micro_configs))

    @property
    def is_baseline(self) -> bool:
        """Whether the configuration is torch's own convolution of the undivided mini-batch."""
        return len(self.micro_configs) == 1 and self.micro_configs[0].algorithm == TORCHS_OWN

    def __str__(self) -> str:
        """Return text for people, such as ``winograd-4x4 8×2``: algorithm, micro-batch size and count."""
        parts = []
        for micro_config, count in Counter(self.micro_configs).items():
            times = f"×{count}" if count > 1 else ""
            parts.append(f"{micro_config.algorithm} {micro_config.micro_batch_size}{times}")
        return " + ".join(parts)


def counts_in(configuration: str) -> tuple[tuple[MicroConfig, int], ...]:
    """Parse the text of a configuration into its micro-configs and their counts.

    Raises ``InvalidInputError`` for other text.

    >>> [(micro_config.algorithm, count) for micro_config, count in counts_in("winograd-4x4 8×2 + gemm 2")]
    [('winograd-4x4', 2), ('gemm', 1)]
    """
    counts = []
    for part in configuration.split(" + "):
        algorithm, _, sizes = part.rpartition(" ")
        size, _, count = sizes.partition("×")
        if not (algorithm and size.isdecimal() and (count or "1").isdecimal()):
            raise InvalidInputError(f"{configuration!r} is not a configuration; one is written as 'gemm 8×2 + gemm 2'")
        counts.append((MicroConfig(algorithm, int(size)), int(count or 1)))
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Times of complete calls of a configuration and of its baseline, interleaved: medians over the rounds, in seconds.

    The baseline is torch's own convolution.

    noise: the ``uncertainty`` of the median of the rounds' speedups.
    load: as in ``Measurement``.
    baseline_samples_s: the baseline's samples of a new comparison, one per round; empty for one from the database.
    time_samples_s: the configuration's samples, one per round.
    paired_speedup: the median of the rounds' speedups, for long calls, which a slow phase of the machine may change.
    """

    baseline_s: float
    time_s: float
    noise: float
    load: float | None = None
    baseline_samples_s: tuple[float, ...] = field(default=(), compare=False, repr=False)
    time_samples_s: tuple[float, ...] = field(default=(), compare=False, repr=False)
    paired_speedup: float | None = None

    @classmethod
    def of(cls, baseline_s: Sequence[float], time_s: Sequence[float]) -> Self:
        """Return the comparison of these samples in seconds, one of the baseline and one of the run per round."""
        noise = uncertainty([b / t for b, t in zip(baseline_s, time_s, strict=True)])
        return cls(
            median(baseline_s),
            median(time_s),
            noise,
            baseline_samples_s=tuple(baseline_s),
            time_samples_s=tuple(time_s),
        )

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine was busy with something else during the run."""
        return is_busy(self.load)

    @property
    def speedup(self) -> float:
        """The ratio of the medians, or the ``paired_speedup`` if there is one."""
        return self.baseline_s / self.time_s if self.paired_speedup is None else self.paired_speedup

    def is_faster(self, least: float) -> bool:
        """Return whether it is faster than the baseline, by more than the noise and more than ``least``."""
        return self.speedup - max(self.noise, least) > 1

    def is_slower(self, least: float) -> bool:
        """Return whether it is slower than the baseline, by more than the noise and more than ``least``."""
        return self.speedup + max(self.noise, least) < 1

    @property
    def speedups(self) -> list[float]:
        """Time of the baseline / time of the run, by round; slowdowns of the machine affect both times and cancel."""
        return [b / t for b, t in zip(self.baseline_samples_s, self.time_samples_s, strict=True)]
