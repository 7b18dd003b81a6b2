"""Runs the convolutions of a table into a result folder, problem by problem, under several policies and limits.

The table is DeepBench's (https://github.com/baidu-research/DeepBench), or any other. A run that is stopped, or whose
time is over, goes on in the same folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median

from mucudnn.bench.contests.bounds import MachineLimits, kind_of_layer
from mucudnn.bench.contests.timing import TurnRounds
from mucudnn.bench.contests.torch_variants import torch_variants
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import PROBLEM_COLUMNS
from mucudnn.bench.folders.writing import FolderWriter, LeftOut, open_folder
from mucudnn.bench.report.records import config_record
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.suites.deepbench.contest import Contests, subject_of
from mucudnn.bench.suites.deepbench.division import divisions
from mucudnn.database.database import Database
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning.sharing import expected_s
from mucudnn.tuning.tuner import machine_and_database
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress, share_of, silent
from mucudnn.words.units import format_seconds

Wanted = tuple[Layer, ConvProblem]


class Balance:
    """Picks what comes next: of the kinds of layers and of the operations that were met least, what has least work.

    met: what is measured already.
    """

    def __init__(self, met: Iterable[Wanted]) -> None:
        self._kinds: Counter[str] = Counter()
        self._operations: Counter[Operation] = Counter()
        self._both: Counter[tuple[str, Operation]] = Counter()
        for one in met:
            self.meet(one)

    def meet(self, wanted: Wanted) -> None:
        """Count a problem as met."""
        _, problem = wanted
        kind = kind_of_layer(problem)
        self._kinds[kind] += 1
        self._operations[problem.operation] += 1
        self._both[kind, problem.operation] += 1

    def next_of(self, left: Iterable[Wanted]) -> Wanted:
        """Return the one that comes next; ``left`` has some."""
        return min(left, key=self._often_met)

    def _often_met(self, wanted: Wanted) -> tuple[int, int, int]:
        layer, problem = wanted
        kind = kind_of_layer(problem)
        alone = self._kinds[kind] + self._operations[problem.operation]
        return alone, self._both[kind, problem.operation], problem.flops(layer.batch_size)


ROUNDS = 15
# Calls of milliseconds are sampled for so long: what two runs of them differ by chance is then some percent.
MOST_ROUNDS, SHORT_S = 81, 0.5


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of a run: the policies and the workspace limits (bytes; None: none) under which ours is chosen.

    rounds: samples of each contestant; short calls get more, up to ``MOST_ROUNDS``.

    time_limit_s: no problem is begun that would not be done by then, as far as the others tell; None: all are. It does
    not decide what is measured, so that a later run may have another one.

    budgets: bytes, each of which is divided over the whole table. at_best: whether each problem has two limits of its
    own, too: the workspace of the fastest undivided algorithm, and one byte less.
    """

    policies: tuple[BatchSizePolicy, ...]
    limits: tuple[int | None, ...]
    rounds: int = ROUNDS
    time_limit_s: float | None = None
    budgets: tuple[int, ...] = ()
    at_best: bool = False


def benchmark_deepbench(
    table: LayerTable,
    config: Config,
    choices: Choices,
    out: Path,
    *,
    device: str = "cpu",
    progress: Progress = silent,
    machine: Machine | None = None,
    database: Database | None = None,
    benchmark: str = "deepbench",
) -> None:
    """Measure the problems of a table into the folder ``out``; what it has already is not measured again.

    config: its policy and its limit do not count. machine, database: used in place of this machine and of the file that
    the config names. benchmark: what the folder says that it is of.

    Raises what ``open_folder`` raises, and ``KeyboardInterrupt``, by then with all that was measured in the folder.
    """
    with (
        machine_and_database(config, device, machine, database) as (on, opened),
        torch_variants(on.device) as variants,
        open_folder(out, _header(benchmark, table, config, choices, on)) as folder,
    ):
        rounds = TurnRounds(choices.rounds, max(choices.rounds, MOST_ROUNDS), SHORT_S)
        wanted = table.problems(config.operations)
        with _summarized(folder, wanted) as left:
            contests = Contests(
                *(config, on, opened, variants, choices.policies, choices.limits, rounds), at_best=choices.at_best
            )
            if left and choices.budgets:
                part, progress = share_of(progress, 0.0, 0.5), share_of(progress, 0.5, 0.5)
                contests = _with_divisions(contests, table, choices, part)
            balance = Balance(one for one in wanted if one not in left)
            _measure(contests, folder, left, balance, choices.time_limit_s, progress)
        folder.improve_limits({dtype: MachineLimits.measured(on.device, dtype) for dtype in folder.header.limits})


def _with_divisions(contests: Contests, table: LayerTable, choices: Choices, progress: Progress) -> Contests:
    found = divisions(
        *(table, contests.config, choices.policies, choices.budgets),
        *(contests.machine, contests.database, contests.priors, progress),
    )
    return replace(contests, divisions=tuple(found))


def _measure(
    contests: Contests,
    folder: FolderWriter,
    left: dict[Wanted, str],
    balance: Balance,
    time_limit_s: float | None,
    progress: Progress,
) -> None:
    """Measure what is left, and take it out of there; what the time does not suffice for stays, with the reason."""
    clock, watch = contests.machine.clock, contests.machine.watch
    end_s = inf if time_limit_s is None else clock.now() + time_limit_s
    pace, count = _Pace(), len(left)
    while fitting := [one for one in left if (begun_s := clock.now()) + pace.expected_s(one) <= end_s]:
        wanted = balance.next_of(fitting)
        layer, problem = wanted
        mark = watch.mark()
        rows, tunings = contests.rows(layer, problem, share_of(progress, 1 - len(left) / count, 1 / count))
        folder.add_candidates(subject_of(layer, problem), tunings)
        folder.add(rows, watch.since(mark))
        del left[wanted]
        balance.meet(wanted)
        pace.learn(wanted, clock.now() - begun_s)
    if time_limit_s is not None:
        left.update(dict.fromkeys(left, f"the {format_seconds(time_limit_s)} would not have sufficed"))


@contextmanager
def _summarized(folder: FolderWriter, wanted: Sequence[Wanted]) -> Iterator[dict[Wanted, str]]:
    """Yield what the folder does not have yet, with the reason; what is still there in the end was left out."""
    left = {one: "the run was stopped before" for one in wanted if not folder.known(subject_of(*one))}
    try:
        yield left
    finally:
        folder.write_summary([LeftOut(f"{layer.name}, {problem}", why) for (layer, problem), why in left.items()])


class _Pace:
    """Estimate of how long problems take, from those that are done: the first is always begun."""

    def __init__(self) -> None:
        self._ratios: list[float] = []

    def learn(self, wanted: Wanted, seconds: float) -> None:
        self._ratios.append(seconds / _estimate(wanted))

    def expected_s(self, wanted: Wanted) -> float:
        return median(self._ratios) * _estimate(wanted) if self._ratios else 0.0


def _estimate(wanted: Wanted) -> float:
    layer, problem = wanted
    return expected_s(problem, layer.batch_size)


def _header(benchmark: str, table: LayerTable, config: Config, choices: Choices, machine: Machine) -> Header:
    wanted = table.problems(config.operations)
    dtype = table.layers[0].problem.dtype
    settings = config_record(replace(config, database=None, workspace_limit=None, policy=choices.policies[0]))
    settings |= {
        "batch_sizes": sorted({layer.batch_size for layer in table.layers}),
        "layers": [layer.name for layer in table.layers],
        "dtype": dtype,
        "memory_format": str(table.layers[0].problem.memory_format),
        "policy": [str(policy) for policy in choices.policies],
        "workspace_limit": list(choices.limits),
        "rounds": choices.rounds,
    }
    if choices.budgets:
        settings["workspace_budget"] = list(choices.budgets)
    if choices.at_best:
        settings["at_best"] = True
    return Header(
        *(benchmark, table.source, settings, machine.environment),
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=len(wanted),
        limits={dtype: MachineLimits.measured(machine.device, dtype)},
    )
