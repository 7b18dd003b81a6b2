"""Times all convolutions of a network, torch's and mucudnn's in both memory formats, in turns in one run.

First both formats are tuned (from the database, where that has been done before). Then each distinct convolution is
measured once. Every round runs torch and mucudnn in each format, so that a slow minute of the machine hits all of them,
and the median over the rounds counts. Every call allocates the tensor that it returns, as a layer does. On CUDA torch
runs in its benchmark mode, too. What seemed slower than torch's is measured once more at the end, in twice the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.contests.timing import Contestant, time_in_turns
from mucudnn.bench.contests.torch_variants import torch_variants
from mucudnn.bench.folders.speedups import LEAST_ROUNDS
from mucudnn.bench.folders.writing import FolderWriter, open_folder
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.sources.table_tuning import tune_table
from mucudnn.bench.suites.network.result import SLOWER, FormatResult, NetworkBenchmark, ProblemResult, SecondLook
from mucudnn.bench.suites.network.stored import header_of, known_result, rows_of, subject_of
from mucudnn.measuring.timing.timer import Clock, Runner, here
from mucudnn.measuring.whole_runs import Machine, run_torch, training_operands, whole_run
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import Progress, share_of, silent

ROUNDS = 15

_Tuned = Mapping[MemoryFormat, TunedProblem]
_Formats = Mapping[MemoryFormat, FormatResult]


def benchmark_network(
    table: LayerTable,
    config: Config | None = None,
    *,
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat),
    rounds: int = ROUNDS,
    device: str = "cpu",
    clock: Clock | None = None,
    progress: Progress | None = None,
    out: Path | None = None,
) -> NetworkBenchmark:
    """Tune and measure every convolution of ``table``, in each of ``memory_formats``, on ``device`` (cpu or cuda).

    rounds: samples of every call. clock: clock of the measuring (not of the tuning); ``None``: that of the device.
    progress: told what is being done and the fraction that is done. out: a result folder, which gets the samples of
    each problem as it is measured; what it has is not measured again.

    Raises what ``open_folder`` and ``tune`` raises, and KeyboardInterrupt, by then with all measurements stored.
    """
    config = config or Config()
    report = progress or silent
    machine = Machine.current(device)
    if clock is not None:
        machine = replace(machine, clock=clock)
    wanted, dtype = table.problems(config.operations), table.layers[0].problem.dtype
    with ExitStack() as stack:
        limits = MachineLimits.measured(device, dtype)
        folder = None
        if out is not None:
            header = header_of(table, config, memory_formats, rounds, machine.environment, limits)
            folder = stack.enter_context(open_folder(out, header))
        both = _in_formats(table, memory_formats)
        tuning = tune_table(both, config, device=device, progress=share_of(report, 0.0, 0.5))
        if tuning.interrupted:
            raise KeyboardInterrupt
        chosen = {(row.tuned.problem, row.tuned.batch_size): row.tuned for row in tuning.rows}
        variants = stack.enter_context(torch_variants(device))
        measuring = _Measuring(machine, variants, rounds, config, folder)
        results = []
        for index, (layer, problem) in enumerate(wanted):
            report(f"{layer.name} {problem.operation}", 0.5 + 0.45 * index / len(wanted))
            tuned = {f: chosen[replace(problem, memory_format=f), layer.batch_size] for f in memory_formats}
            formats = measuring.results(layer, tuned)
            results.append(ProblemResult(layer.names, problem.operation, layer.count, formats))
        second_looks = _second_looks(results, measuring, share_of(report, 0.95, 1.0))
        limits = limits.or_better(MachineLimits.measured(device, dtype))
        if folder is not None:
            folder.improve_limits({dtype: limits})
            folder.write_summary()
    return NetworkBenchmark(table.source, config, machine.environment, tuple(results), rounds, limits, second_looks)


def _in_formats(table: LayerTable, memory_formats: Sequence[MemoryFormat]) -> LayerTable:
    layers = (
        replace(layer, problem=replace(layer.problem, memory_format=memory_format))
        for memory_format in memory_formats
        for layer in table.layers
    )
    return replace(table, layers=tuple(layers))


@dataclass(frozen=True, slots=True)
class _Measuring:
    """Measuring of problems. folder: where samples are kept, and found; ``None``: nowhere."""

    machine: Machine
    variants: Mapping[str, Runner]
    rounds: int
    config: Config
    folder: FolderWriter | None

    def results(self, layer: Layer, tuned: _Tuned) -> _Formats:
        """Return the times of one problem in every format: those that the folder has, or new ones, which it gets."""
        known = self._known(layer, tuned)
        if known is not None:
            return known
        mark = self.machine.watch.mark()
        results = self._measure(tuned)
        load = self.machine.watch.since(mark)
        if self.folder is not None:
            for one in tuned.values():
                self.folder.add_candidates(subject_of(layer, one), [one])
            rows = [row for result in results.values() for row in rows_of(layer, result, self.config)]
            self.folder.add(rows, load)
        return results

    def look_again(self, first: ProblemResult, memory_format: MemoryFormat) -> SecondLook:
        """Measure a convolution in twice the rounds. A folder does not get them: its rows are first looks."""
        rounds = max(2 * self.rounds, LEAST_ROUNDS)
        again = replace(self, rounds=rounds)._measure({memory_format: first.formats[memory_format].tuned})
        return SecondLook(first, memory_format, again[memory_format])

    def _known(self, layer: Layer, tuned: _Tuned) -> _Formats | None:
        if self.folder is None:
            return None
        known = {f: known_result(self.folder.known(subject_of(layer, one)), one) for f, one in tuned.items()}
        found = {f: result for f, result in known.items() if result is not None}
        return found if len(found) == len(tuned) else None

    def _measure(self, tuned: _Tuned) -> _Formats:
        """Time torch's calls and ours of one problem in every format, in turns."""
        contestants = [one for chosen in tuned.values() for one in self._contestants(chosen)]
        times = iter(time_in_turns(contestants, self.rounds, self.machine.clock))
        results = {}
        for memory_format, chosen in tuned.items():
            torchs = {name: next(times) for name in self.variants}
            results[memory_format] = FormatResult(torchs.pop(TORCH), next(times), chosen, torchs)
        return results

    def _contestants(self, tuned: TunedProblem) -> list[Contestant]:
        """Torch under each of its settings, then ours, on the same random tensors; each allocates what it returns."""
        operands = training_operands(tuned.problem, tuned.batch_size, self.machine.device)
        call = partial(run_torch, tuned.problem, operands)
        torchs = [Contestant(call, runner) for runner in self.variants.values()]
        ours = whole_run(tuned.problem, tuned.configuration, operands)
        return [*torchs, Contestant(ours, self.variants[TORCH] if tuned.configuration.is_baseline else here)]


def _second_looks(results: Sequence[ProblemResult], measuring: _Measuring, report: Progress) -> tuple[SecondLook, ...]:
    slower = [(result, f) for result in results for f, one in result.formats.items() if one.speedup < SLOWER]
    looks = []
    for index, (result, memory_format) in enumerate(slower):
        report(f"{result.names[0]} {result.operation} again", index / len(slower))
        looks.append(measuring.look_again(result, memory_format))
    return tuple(looks)
