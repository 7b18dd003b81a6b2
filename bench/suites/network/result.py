"""Result of the network benchmark: times of every convolution in each memory format, and their sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median

from mucudnn.bench.contests.bounds import MachineLimits, means_by_kind
from mucudnn.bench.contests.timing import MedianTime
from mucudnn.bench.folders.speedups import Speedup, speedup_of
from mucudnn.running.environment import Environment
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat, Operation

SLOWER = 0.97  # a speedup below is looked at again


@dataclass(frozen=True, slots=True)
class FormatResult:
    """One convolution in one memory format. The times are the benchmark's own; those of the tuning are in ``tuned``.

    torch_benchmarks: torch in its benchmark mode, by the names of ``torch_variants``; empty on the CPU.
    """

    torch: MedianTime
    mucudnn: MedianTime
    tuned: TunedProblem
    torch_benchmarks: Mapping[str, MedianTime] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        return self.torch.time_s / self.mucudnn.time_s

    @property
    def predicted_over_measured(self) -> float:
        return self.tuned.configuration.time_s / self.mucudnn.time_s


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """One operation of one layer, which occurs ``count`` times in the network."""

    names: tuple[str, ...]
    operation: Operation
    count: int
    formats: Mapping[MemoryFormat, FormatResult]

    @property
    def batch_size(self) -> int:
        return next(iter(self.formats.values())).tuned.batch_size

    @property
    def best_format(self) -> MemoryFormat:
        """The memory format in which mucudnn is faster."""
        return min(self.formats, key=lambda memory_format: self.formats[memory_format].mucudnn.time_s)


@dataclass(frozen=True, slots=True)
class SecondLook:
    """One convolution that seemed slower than torch's in one memory format, measured again by itself."""

    first: ProblemResult
    memory_format: MemoryFormat
    again: FormatResult

    @property
    def speedup(self) -> Speedup:
        """The second speedup, with its interval."""
        return speedup_of([self.again.torch.samples_s], [self.again.mucudnn.samples_s])

    @property
    def is_confirmed(self) -> bool:
        """Whether it is slower this time, too."""
        return self.again.speedup < SLOWER


@dataclass(frozen=True, slots=True)
class NetworkBenchmark:
    """All convolutions of a network. Sums count each convolution as often as it occurs.

    second_looks: at what seemed slower than torch's. They change no sum: only losses were measured again.
    """

    network: str
    config: Config
    environment: Environment
    problems: tuple[ProblemResult, ...]
    rounds: int
    limits: MachineLimits
    second_looks: tuple[SecondLook, ...] = ()
    date: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def memory_formats(self) -> tuple[MemoryFormat, ...]:
        return tuple(self.problems[0].formats)

    def torch_s(self, memory_format: MemoryFormat) -> float:
        return sum(p.count * p.formats[memory_format].torch.time_s for p in self.problems)

    @property
    def torch_benchmarks(self) -> tuple[str, ...]:
        """The names of torch's benchmark modes that were measured."""
        return tuple(self._results[0].torch_benchmarks)

    def torch_benchmark_s(self, name: str, memory_format: MemoryFormat) -> float:
        return sum(p.count * p.formats[memory_format].torch_benchmarks[name].time_s for p in self.problems)

    def mucudnn_s(self, memory_format: MemoryFormat) -> float:
        return sum(p.count * p.formats[memory_format].mucudnn.time_s for p in self.problems)

    def speedup(self, memory_format: MemoryFormat) -> float:
        return self.torch_s(memory_format) / self.mucudnn_s(memory_format)

    @property
    def speedup_best(self) -> float:
        """Torch in its better memory format over mucudnn in its better one."""
        return min(map(self.torch_s, self.memory_formats)) / min(map(self.mucudnn_s, self.memory_formats))

    def over_bound(self, result: FormatResult) -> float:
        """Our time over the machine's bound of the direct method (``MachineLimits``)."""
        return result.mucudnn.time_s / self.limits.bound_s(result.tuned.problem, result.tuned.batch_size)

    def over_bound_by_kind(self) -> dict[str, float]:
        """Geometric means of the same in our faster format, by kind of layer; empty where no limits are known."""
        faster = [problem.formats[problem.best_format] for problem in self.problems]
        return means_by_kind((r.tuned.problem, self.over_bound(r)) for r in faster) if self.limits.are_known else {}

    @property
    def prediction_error(self) -> float:
        """Median over all configurations of |predicted / measured - 1|.

        The machine may have had another pace when the parts were measured.
        """
        return median(abs(result.predicted_over_measured - 1) for result in self._results)

    @property
    def prediction_error_when_tuned(self) -> float:
        """The same, against the whole runs that followed the measuring of the parts, seconds later."""
        return median(abs(r.tuned.configuration.time_s / r.tuned.time_s - 1) for r in self._results)

    @property
    def _results(self) -> list[FormatResult]:
        return [result for problem in self.problems for result in problem.formats.values()]
