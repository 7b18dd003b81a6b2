"""Times all convolutions of a network, torch's and mucudnn's in both memory formats, in turns in one run.

First both formats are tuned (from the database, where that has been done before). Then each distinct convolution is
measured once. Every round runs torch and mucudnn in each format, so that a slow minute of the machine hits all of them,
and the median over the rounds counts. Every call allocates the tensor that it returns, as a layer does. On CUDA torch
runs in its benchmark mode, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.contests.timing import Contestant, time_in_turns
from mucudnn.bench.contests.torch_variants import TORCH, torch_variants
from mucudnn.bench.measure.whole_runs import Machine, run_torch, training_operands, whole_run
from mucudnn.bench.sources.layers import LayerTable
from mucudnn.bench.sources.table_tuning import tune_table
from mucudnn.bench.suites.network.result import FormatResult, NetworkBenchmark, ProblemResult
from mucudnn.bench.timing.timer import Clock, Runner, here
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import Progress, share_of, silent

ROUNDS = 15


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

    rounds: samples of every call. clock: clock of the measuring (not of the tuning); ``None``: that of the device.
    progress: told what is being done and the fraction that is done.

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
    limits = MachineLimits.measured(device, wanted[0][1].dtype)
    with torch_variants(device) as variants:
        for index, (layer, problem) in enumerate(wanted):
            report(f"{layer.name} {problem.operation}", 0.5 + index / len(wanted) / 2)
            tuned = {f: chosen[replace(problem, memory_format=f), layer.batch_size] for f in memory_formats}
            formats = _measure(tuned, variants, device, rounds, clock or machine.clock)
            results.append(ProblemResult(layer.names, problem.operation, layer.count, formats))
    limits = limits.or_better(MachineLimits.measured(device, wanted[0][1].dtype))
    return NetworkBenchmark(table.source, config, machine.environment, tuple(results), rounds, limits)


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
    """Time torch's calls and ours of one problem in every format, in turns."""
    contestants = [one for chosen in tuned.values() for one in _contestants(chosen, variants, device)]
    times = iter(time_in_turns(contestants, rounds, clock))
    results = {}
    for memory_format, chosen in tuned.items():
        torchs = {name: next(times) for name in variants}
        results[memory_format] = FormatResult(torchs.pop(TORCH), next(times), chosen, torchs)
    return results


def _contestants(tuned: TunedProblem, variants: Mapping[str, Runner], device: str) -> list[Contestant]:
    """Torch under each of its settings, then ours, on the same random tensors; each allocates what it returns."""
    operands = training_operands(tuned.problem, tuned.batch_size, device)
    torchs = [Contestant(partial(run_torch, tuned.problem, operands), runner) for runner in variants.values()]
    ours = whole_run(tuned.problem, tuned.configuration, operands)
    return [*torchs, Contestant(ours, variants[TORCH] if tuned.configuration.is_baseline else here)]
