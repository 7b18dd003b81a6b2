"""All convolutions of a network, torch's and mucudnn's in both memory formats, in turns in one run.

First both formats are tuned (from the database, where that has been done before), then each distinct convolution is
measured once: every round runs torch and mucudnn in each format, so that a slow minute of the machine hits all of them,
and the median over the rounds counts. Every call allocates the tensor that it returns, as a layer does. On CUDA torch
runs in its benchmark mode, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from statistics import median

from mucudnn.bench.contests.torch_variants import TORCH, torch_variants
from mucudnn.bench.contests.turns import Cell, Runner, Turn, here, take_turns
from mucudnn.bench.measure.operands import random_operands
from mucudnn.bench.measure.timer import Clock
from mucudnn.bench.measure.whole_runs import Machine, run_torch, run_whole
from mucudnn.bench.sources.layers import LayerTable
from mucudnn.bench.sources.table_tuning import tune_table
from mucudnn.running.environment import Environment
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat, Operation
from mucudnn.words.progress import Progress, share_of, silent

ROUNDS = 15


@dataclass(frozen=True, slots=True)
class FormatResult:
    """One convolution in one memory format. The benchmark's own times; those of the tuning are in ``tuned``.

    torch_benchmarks: torch in its benchmark mode, by the names of ``torch_variants``; empty on the CPU.
    """

    torch: Cell
    mucudnn: Cell
    tuned: TunedProblem
    torch_benchmarks: Mapping[str, Cell] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        return self.torch.time_s / self.mucudnn.time_s

    @property
    def predicted_over_measured(self) -> float:
        return self.tuned.configuration.time_s / self.mucudnn.time_s


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """One operation of one layer, which occurs ``count`` times in the network."""

    layer: str
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
class NetworkBenchmark:
    """All convolutions of a network. Sums count each convolution as often as it occurs."""

    network: str
    config: Config
    environment: Environment
    problems: tuple[ProblemResult, ...]
    rounds: int = ROUNDS
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

    @property
    def prediction_error(self) -> float:
        """Median over all configurations of |predicted / measured - 1|: by now the machine may have another pace."""
        return median(abs(result.predicted_over_measured - 1) for result in self._results)

    @property
    def prediction_error_when_tuned(self) -> float:
        """The same against the whole runs that followed the measuring of the parts, seconds later."""
        return median(abs(r.tuned.configuration.time_s / r.tuned.time_s - 1) for r in self._results)

    @property
    def _results(self) -> list[FormatResult]:
        return [result for problem in self.problems for result in problem.formats.values()]


def benchmark_network(
    table: LayerTable,
    config: Config | None = None,
    *,
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat),
    rounds: int = ROUNDS,
    device: str = "cpu",
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> NetworkBenchmark:
    """Tune and measure every convolution of ``table``, in each of ``memory_formats``, on ``device`` (cpu or cuda).

    rounds: samples of every call. clock: what the measuring (not the tuning) reads; default: that of the device.
    progress: called with what is being done and the fraction that is done.

    Raises what ``tune`` raises, and KeyboardInterrupt, by then with all measurements stored.
    """
    config = config or Config()
    report = progress or silent
    machine = Machine.current(device)
    both = _in_formats(table, memory_formats)
    tuning = tune_table(both, config, device=device, progress=share_of(report, 0.0, 0.5))
    if tuning.interrupted:
        raise KeyboardInterrupt
    chosen = {(row.tuned.problem, row.tuned.batch_size): row.tuned for row in tuning.rows}
    wanted = table.problems(config.operations)
    results = []
    with torch_variants(device) as variants:
        for index, (layer, problem) in enumerate(wanted):
            report(f"{layer.name} {problem.operation}", 0.5 + index / len(wanted) / 2)
            tuned = {f: chosen[replace(problem, memory_format=f), layer.batch_size] for f in memory_formats}
            formats = _measure(tuned, variants, device, rounds, clock or machine.clock)
            results.append(ProblemResult(layer.name, problem.operation, layer.count, formats))
    return NetworkBenchmark(table.source, config, machine.environment, tuple(results), rounds)


def _in_formats(table: LayerTable, memory_formats: Sequence[MemoryFormat]) -> LayerTable:
    layers = (
        replace(layer, problem=replace(layer.problem, memory_format=memory_format))
        for memory_format in memory_formats
        for layer in table.layers
    )
    return replace(table, layers=tuple(layers))


def _measure(
    tuned: Mapping[MemoryFormat, TunedProblem],
    variants: Mapping[str, Runner],
    device: str,
    rounds: int,
    clock: Clock,
) -> dict[MemoryFormat, FormatResult]:
    """Torch's calls and ours of one problem in every format, in turns."""
    turns = [turn for chosen in tuned.values() for turn in _turns(chosen, variants, device)]
    cells = iter(take_turns(turns, rounds, clock))
    results = {}
    for memory_format, chosen in tuned.items():
        torchs = {name: next(cells) for name in variants}
        results[memory_format] = FormatResult(torchs.pop(TORCH), next(cells), chosen, torchs)
    return results


def _turns(tuned: TunedProblem, variants: Mapping[str, Runner], device: str) -> list[Turn]:
    """Torch under each of its settings, then ours, on the same random tensors; each returns one that it allocates."""
    operands = random_operands(tuned.problem, tuned.batch_size, device)
    torchs = [Turn(partial(run_torch, tuned.problem, operands), runner) for runner in variants.values()]
    ours = partial(run_whole, tuned.problem, tuned.configuration, operands)
    return [*torchs, Turn(ours, variants[TORCH] if tuned.configuration.is_baseline else here)]
