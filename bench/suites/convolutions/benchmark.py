"""The benchmark of all convolutions of a layer table, one problem after the other.

A run that was interrupted or reached its time limit can be resumed in the same folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import median

from mucudnn.bench.results.bounds import MachineLimits, kind_of_layer
from mucudnn.bench.results.reading import PROBLEM_COLUMNS, Header, LeftOut
from mucudnn.bench.results.writing import FolderWriter, config_record, open_folder
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.sources.table_tuning import problems_to_tune, table_tasks
from mucudnn.bench.suites.convolutions.contest import Choices, Contests, Divided, subject_of
from mucudnn.bench.suites.shared.timing import torch_variants
from mucudnn.core.config import DEFAULT_WORKSPACE_LIMIT, BatchSizePolicy, Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.values import format_seconds
from mucudnn.measuring.clocks import kept_heap
from mucudnn.measuring.whole_runs import Machine
from mucudnn.store.database import Database
from mucudnn.tuning.job import expected_s
from mucudnn.tuning.tuner import machine_and_database


def benchmark_convolutions(
    table: LayerTable,
    config: Config,
    choices: Choices,
    out: Path,
    *,
    device: str = "cpu",
    progress: Progress = silent,
    machine: Machine | None = None,
    database: Database | None = None,
) -> None:
    """Time the convolution problems of a table; write rows into the folder ``out``, skipping problems it already has.

    config: its policy, limit and budget are ignored. machine, database: by default this machine and the config's
    database file.

    Raises the errors of ``open_folder`` and ``tune``. On ``KeyboardInterrupt``, everything measured so far is in the
    folder.
    """
    wanted = problems_to_tune(table, config)
    with (
        machine_and_database(config, device, machine, database) as (on, opened),
        torch_variants(on.device) as variants,
        kept_heap(),
        open_folder(out, _header(table, config, choices, on)) as folder,
    ):
        run = _Run(folder, Contests(config, on, opened, variants, choices), wanted)
        with run.summarized():
            if run.left and choices.budgets:
                part, progress = share_of(progress, 0.0, 0.5), share_of(progress, 0.5, 0.5)
                run.contests = replace(run.contests, divided=_divided(table, run.contests, part))
            run.measure(progress)
        folder.improve_limits({dtype: MachineLimits.measured(on.device, dtype) for dtype in folder.header.limits})


def _header(table: LayerTable, config: Config, choices: Choices, machine: Machine) -> Header:
    kinds = choices.of(table.layers[0].problem)
    dtypes = [*dict.fromkeys(one.dtype for one in kinds)]
    settings = {
        **config_record(config),
        "batch_sizes": sorted({layer.batch_size for layer in table.layers}),
        "layers": [layer.name for layer in table.layers],
        "dtype": dtypes,
        "memory_format": [*dict.fromkeys(str(one.memory_format) for one in kinds)],
        "rounds": choices.rounds,
        "policy": [str(one) for one in choices.policies],
        "workspace_limit": list(choices.limits),
        "workspace_budget": list(choices.budgets) or None,
    }
    return Header(
        *("convolutions", table.source, settings, machine.environment),
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=len(table.problems(config.operations)) * len(kinds),
        limits={dtype: MachineLimits.measured(machine.device, dtype) for dtype in dtypes},
    )


def _divided(table: LayerTable, contests: Contests, progress: Progress) -> dict[tuple[BatchSizePolicy, int], Divided]:
    """Divide each budget over all problems of the table under each policy, separately in each dtype and memory format.

    Raises the errors of ``tune``.
    """
    choices = contests.choices
    kinds = zip(*(choices.of(layer.problem) for layer in table.layers), strict=True)
    tables = [
        replace(table, layers=tuple(map(lambda layer, one: replace(layer, problem=one), table.layers, problems)))
        for problems in kinds
    ]
    wanted = [*product(choices.policies, choices.budgets, tables)]
    found: dict[tuple[BatchSizePolicy, int], Divided] = {}
    for index, (policy, budget, one) in enumerate(wanted):
        config = replace(
            contests.config, policy=policy, workspace_limit=DEFAULT_WORKSPACE_LIMIT, workspace_budget=budget
        )
        tasks, part = table_tasks(one, config), share_of(progress, index / len(wanted), 1 / len(wanted))
        names = [(layer.name, layer.batch_size, problem) for layer, problem in problems_to_tune(one, config)]
        try:
            chosen: Divided = dict(zip(names, contests.tune(tasks, config, part).problems, strict=True))
        except InfeasibleError as error:
            chosen = dict.fromkeys(names, " ".join(str(error).split()))
        found[policy, budget] = {**found.get((policy, budget), {}), **chosen}
    return found


@dataclass(slots=True)
class _Run:
    """A benchmark run that writes into an open folder.

    left: the problems that the folder still lacks, each with the reason.
    """

    folder: FolderWriter
    contests: Contests
    wanted: Sequence[Wanted]
    left: dict[Wanted, str] = field(init=False)

    def __post_init__(self) -> None:
        stopped = "the run was stopped before"
        self.left = {
            (layer, problem): stopped
            for layer, problem in self.wanted
            if not all(self.folder.known(subject_of(layer, one)) for one in self.contests.choices.of(problem))
        }

    @contextmanager
    def summarized(self) -> Iterator[None]:
        """Write a summary of the unmeasured problems at the end of this context, also after an error."""
        try:
            yield
        finally:
            left = [LeftOut(f"{layer.name}, {problem}", why) for (layer, problem), why in self.left.items()]
            self.folder.write_summary(left)

    def measure(self, progress: Progress) -> None:
        """Measure the problems in ``left`` and remove them; problems beyond the time limit remain, with the reason.

        With a time limit, kinds of layers alternate; without one, problems are measured in the order of the table.
        """
        clock, watch = self.contests.machine.clock, self.contests.machine.watch
        limit_s = self.contests.choices.time_limit_s
        end_s = inf if limit_s is None else clock.now() + limit_s
        balance = Balance(one for one in self.wanted if one not in self.left)
        ratios, count = list[float](), len(self.left)
        while fitting := [one for one in self.left if (begun_s := clock.now()) + _expected_s(one, ratios) <= end_s]:
            wanted = fitting[0] if limit_s is None else balance.next_of(fitting)
            mark = watch.mark()
            part = share_of(progress, 1 - len(self.left) / count, 1 / count)
            rows, tunings = self.contests.rows(*wanted, part)
            for subject, tuned in tunings:
                self.folder.add_candidates(subject, tuned)
            self.folder.add(rows, watch.since(mark))
            del self.left[wanted]
            balance.meet(wanted)
            layer, problem = wanted
            ratios.append((clock.now() - begun_s) / expected_s(problem, layer.batch_size))
        if limit_s is not None:
            self.left.update(dict.fromkeys(self.left, f"the {format_seconds(limit_s)} would not have sufficed"))


Wanted = tuple[Layer, ConvProblem]


class Balance:
    """Selects the next problem: the kind of layer and operation measured least so far, and of these the fewest FLOPs.

    met: problems that are already measured.
    """

    def __init__(self, met: Iterable[Wanted]) -> None:
        self._kinds: Counter[str] = Counter()
        self._operations: Counter[Operation] = Counter()
        self._both: Counter[tuple[str, Operation]] = Counter()
        for one in met:
            self.meet(one)

    def meet(self, wanted: Wanted) -> None:
        """Count one more measurement of a problem's kind of layer and operation."""
        _, problem = wanted
        kind = kind_of_layer(problem)
        self._kinds[kind] += 1
        self._operations[problem.operation] += 1
        self._both[kind, problem.operation] += 1

    def next_of(self, left: Iterable[Wanted]) -> Wanted:
        """Return the problem of ``left`` to measure next; ``left`` must not be empty."""
        return min(left, key=self._often_met)

    def _often_met(self, wanted: Wanted) -> tuple[int, int, int]:
        layer, problem = wanted
        kind = kind_of_layer(problem)
        alone = self._kinds[kind] + self._operations[problem.operation]
        return alone, self._both[kind, problem.operation], problem.flops(layer.batch_size)


def _expected_s(wanted: Wanted, ratios: Sequence[float]) -> float:
    """Estimate the seconds that measuring a problem takes; 0 for the first one, so that it is always started.

    ratios: measured over estimated seconds of the problems measured so far.
    """
    layer, problem = wanted
    return median(ratios) * expected_s(problem, layer.batch_size) if ratios else 0.0
