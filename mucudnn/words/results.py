"""Results: micro-configs with what they cost, and configurations made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Self

from mucudnn.words.errors import InvalidInputError
from mucudnn.words.samples import MeasuredSamples, PairedSamples, uncertainty
from mucudnn.words.torch_settings import TORCHS_OWN
from mucudnn.words.values import flag, instance, plain, settle, several, shown, text, whole

# Share of a core that others may take from a measurement that is trusted. A desktop without work takes a twentieth, and
# ticks of the kernel blur as much; what disturbs for long takes a third and more.
BUSY = 0.15
NOISY = 0.25  # noise above which a measurement is doubtful in any case
NOISY_UNWATCHED = 0.1  # and where nobody knows the load


def source_of(algorithm: str) -> str:
    """Name what offers the algorithm of this name: ``library`` for ``library:67 k2=5``, else the algorithm itself."""
    return algorithm.partition(":")[0]


def package_of(algorithm: str) -> str | None:
    """Return ``own`` for ``own/pointwise``: the package that brings the algorithm; None for one of mucudnn's own."""
    package, slash, _ = algorithm.partition("/")
    return package if slash else None


def is_busy(load: float | None) -> bool:
    """Whether what was measured under this load is doubtful; an unknown load is none."""
    return load is not None and load > BUSY


def is_doubtful(noise: float, load: float | None) -> bool:
    """Whether it should be measured again: under load, or much noisier than on a quiet machine."""
    return is_busy(load) or noise > (NOISY_UNWATCHED if load is None else NOISY)


@dataclass(frozen=True, slots=True, order=True)
class MicroConfig:
    """One algorithm on one micro-batch size (samples): the unit that is measured.

    Raises ``InvalidInputError`` for what is no name and no number of samples.
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
class Measurement:
    """The costs of a micro-config on one problem (seconds, bytes), and its distance from float64.

    setup_s (open and close, once a call) and prepared_bytes belong to the algorithm, step_s and scratch_bytes to each
    of its micro-batches. noise: IQR / median of the step samples. load: part of the machine's speed that others, limits
    or slow clocks took meanwhile, from 0 to 1; None: unknown. raw: its
    samples, where it was made just now; what is read to choose from has none.
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
    raw: MeasuredSamples | None = field(default=None, compare=False, repr=False)

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine was busy with something else."""
        return is_busy(self.load)


@dataclass(frozen=True, slots=True)
class Failure:
    """A micro-config that was not measured, with the reason in words.

    is_lasting: it would fail again. A lack of memory does not last: it is not stored, and tried again. is_passed_over:
    it did not fail but was left out, as hopeless or too large: a thorough tuning measures it. by_arithmetic: it was
    left out for its arithmetic alone, and may win once a higher rate is seen. needed_bytes: the workspace for which it
    was left out; None where that was not why. is_unproven: it is foreign code that could not be proven in a process
    of its own, and so was not run; that does not last either.
    """

    micro_config: MicroConfig
    reason: str
    is_lasting: bool = True
    is_passed_over: bool = False
    by_arithmetic: bool = False
    needed_bytes: int | None = None
    is_unproven: bool = False

    @property
    def why(self) -> str:
        """Return the reason, and whether it is one for having been left out."""
        return f"passed over: {self.reason}" if self.is_passed_over else self.reason


def too_large(micro_config: MicroConfig, needed_bytes: int) -> Failure:
    """Say that a micro-config was not measured since it needs more workspace than there was allowed."""
    reason = f"needs {needed_bytes} bytes of workspace"
    return Failure(micro_config, reason, is_passed_over=True, needed_bytes=needed_bytes)


def passed_over(micro_config: MicroConfig, reason: str, *, by_arithmetic: bool = False) -> Failure:
    """Say why a micro-config was not measured, although it may run."""
    return Failure(micro_config, reason, is_passed_over=True, by_arithmetic=by_arithmetic)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Micro-configs that together cover a mini-batch, in the order in which they run.

    Equal algorithms stand next to each other, larger micro-batches first. time_s: predicted, the sum of setups and
    steps. workspace_bytes: the sum of prepared bytes and the largest scratch.

    Raises ``InvalidInputError`` for what are no micro-configs. Costs are checked by the solver.

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
            micro_configs=tuple(instance(MicroConfig, one, "micro_config") for one in several(self.micro_configs)),
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
        """Tell whether it is torch's own convolution, undivided."""
        return len(self.micro_configs) == 1 and self.micro_configs[0].algorithm == TORCHS_OWN

    def __str__(self) -> str:
        """Text for people: algorithm, micro-batch size, how often."""
        parts = []
        for micro_config, count in Counter(self.micro_configs).items():
            times = f"×{count}" if count > 1 else ""
            parts.append(f"{micro_config.algorithm} {micro_config.micro_batch_size}{times}")
        return " + ".join(parts)


def counts_in(configuration: str) -> tuple[tuple[MicroConfig, int], ...]:
    """Return the micro-configs of a configuration that was written as text, each with how often it runs.

    Raises ``InvalidInputError`` for other text.

    >>> [(micro_config.algorithm, count) for micro_config, count in counts_in("winograd-4x4 8×2 + gemm 2")]
    [('winograd-4x4', 2), ('gemm', 1)]
    """
    found = []
    for part in configuration.split(" + "):
        algorithm, _, sizes = part.rpartition(" ")
        size, _, count = sizes.partition("×")
        if not (algorithm and size.isdecimal() and (count or "1").isdecimal()):
            raise InvalidInputError(f"{configuration!r} is no configuration; one is written as 'gemm 8×2 + gemm 2'")
        found.append((MicroConfig(algorithm, int(size)), int(count or 1)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WholeRun:
    """A configuration run whole, and its baseline, interleaved: medians in seconds over the rounds.

    The baseline is torch's own convolution. For a run with a cached filter it is the same module without its cache.
    noise: the ``uncertainty`` of the median of the rounds' speedups. load, raw: as of a ``Measurement``.
    """

    baseline_s: float
    time_s: float
    noise: float
    load: float | None = None
    raw: PairedSamples | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, baseline_s: Sequence[float], time_s: Sequence[float]) -> Self:
        """Return what samples tell, of which there is one of each in every round."""
        raw = PairedSamples(tuple(baseline_s), tuple(time_s))
        return cls(median(baseline_s), median(time_s), uncertainty(raw.speedups), raw=raw)

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine was busy with something else."""
        return is_busy(self.load)

    @property
    def speedup(self) -> float:
        return self.baseline_s / self.time_s


ADDITION = "addition"
ACTIVATIONS = ("ReLU", "ReLU6", "SiLU")  # computed by ``kernels/contract/epilogue.py``


@dataclass(frozen=True, slots=True)
class WithEpilogue:
    """A whole run of a fused convolution: y is followed by an epilogue, and so is that of torch's own.

    activation: one of ``ACTIVATIONS``, or ``None``. adds: whether a tensor of y's shape is added before it.

    Raises ``InvalidInputError`` for other values, and where nothing follows y.

    >>> str(WithEpilogue("ReLU6", adds=True))
    'with addition and ReLU6'
    """

    activation: str | None = None
    adds: bool = False

    def __post_init__(self) -> None:
        if not (self.activation is None or self.activation in ACTIVATIONS):
            allowed = ", ".join(ACTIVATIONS)
            raise InvalidInputError(f"activation is {shown(self.activation)}; it must be one of {allowed}, or None")
        activation = None if self.activation is None else text(self.activation, "activation")
        settle(self, activation=activation, adds=flag(self.adds, "adds"))
        if not self.parts:
            raise InvalidInputError("an epilogue adds a tensor, or has an activation; this one has neither")

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what follows y, in their order."""
        activation = () if self.activation is None else (self.activation,)
        return (ADDITION, *activation) if self.adds else activation

    def __str__(self) -> str:
        return f"with {' and '.join(self.parts)}"


@dataclass(frozen=True, slots=True)
class WithCachedFilter:
    """A whole run with a cached filter: the algorithm that prepares it, and what runs without the cache instead.

    All other whole runs are compared with torch's own convolution. epilogue: of y, with the cache and without.
    """

    algorithm: str
    instead_of: tuple[MicroConfig, ...]
    epilogue: WithEpilogue | None = None

    def __str__(self) -> str:
        return "filter kept" if self.epilogue is None else f"filter kept, {self.epilogue}"


@dataclass(frozen=True, slots=True)
class WithFreshWorkspace:
    """A whole run whose workspace is allocated for the call. All others keep theirs from call to call."""

    def __str__(self) -> str:
        return "fresh workspace"


How = WithCachedFilter | WithFreshWorkspace | WithEpilogue | None  # what is special in a whole run; None: nothing


def epilogue_of(how: How) -> WithEpilogue | None:
    """Return what follows y in a whole run; ``None``: nothing."""
    return how.epilogue if isinstance(how, WithCachedFilter) else how if isinstance(how, WithEpilogue) else None
