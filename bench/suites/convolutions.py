"""Interleaved timing of a table's convolutions: torch's, mucudnn's best undivided algorithm, and its configurations.

A run that was interrupted or reached its time limit can be resumed in the same folder. Configurations that divide a
budget over the whole table are timed together with those chosen for each problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas

from mucudnn.bench.results.bounds import MachineLimits, kind_of_layer
from mucudnn.bench.results.pages.measured import measured, summary_rows
from mucudnn.bench.results.pages.tables import summary_table
from mucudnn.bench.results.reading import PROBLEM_COLUMNS, Header, LeftOut, ResultFolder, Subject, problem_columns
from mucudnn.bench.results.variants import TORCH, shown_name
from mucudnn.bench.results.writing import FolderWriter, Row, config_record, open_folder
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.sources.table_tuning import problems_to_tune, table_tasks
from mucudnn.bench.suites.shared.timing import Contestant, Samples, torch_variants, try_in_turns
from mucudnn.core.config import DEFAULT_WORKSPACE_LIMIT, BatchSizePolicy, Config
from mucudnn.core.errors import CANDIDATE_ERRORS, InfeasibleError, UnsoundError, first_line
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import BUSY, Configuration, MicroConfig, Task
from mucudnn.core.tables import Table, listed, milliseconds, new_table, ratio
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_seconds
from mucudnn.measuring.clocks import kept_heap
from mucudnn.measuring.turns import Rounds, Runner
from mucudnn.measuring.whole_runs import Machine, training_operands
from mucudnn.store.database import Database
from mucudnn.tuning.job import expected_s
from mucudnn.tuning.result import TunedProblem, Tuning
from mucudnn.tuning.tuner import Priors, machine_and_database, tune_tasks

UNDIVIDED, OURS, DIVIDED = "undivided", "mucudnn", "mucudnn-wd"  # contestants; the last one has a budget

_Choice = tuple[str, BatchSizePolicy, int | None]  # contestant, policy, limit or budget in bytes
_Chosen = Mapping[_Choice, tuple[TunedProblem | str, float | None]]  # the choice, or why there is none; tuning seconds
_Call = str | tuple[MicroConfig, ...]  # a variant of torch, or the micro-batches of a configuration
_Time = Samples | Exception
_Times = Mapping[_Call, _Time]

ROUNDS = 15
# Short calls are sampled for SHORT_S seconds, which reduces the noise between two runs to a few percent.
MOST_ROUNDS, SHORT_S = 81, 0.5


@dataclass(frozen=True, slots=True)
class Choices:
    """Settings of a run: what is compared.

    policies, limits: mucudnn chooses under each policy and workspace limit (bytes, None for no limit). budgets: bytes,
    each also divided over the whole table. dtypes, memory_formats: timed interleaved for each problem; if empty, the
    table's own. rounds: time samples of each contestant; short calls get more, up to ``MOST_ROUNDS``. time_limit_s: a
    problem is started only if it is expected to finish by then; None for no time limit. A resumed run may have another.
    """

    policies: tuple[BatchSizePolicy, ...] = (BatchSizePolicy.POWER_OF_TWO,)
    limits: tuple[int | None, ...] = (None,)
    budgets: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    memory_formats: tuple[MemoryFormat, ...] = ()
    rounds: int = ROUNDS
    time_limit_s: float | None = None

    def of(self, problem: ConvProblem) -> list[ConvProblem]:
        """Return a problem in each dtype and memory format."""
        kinds = product(self.dtypes or (problem.dtype,), self.memory_formats or (problem.memory_format,))
        return [replace(problem, dtype=dtype, memory_format=memory_format) for dtype, memory_format in kinds]


# The choice, or why there is none, by the layer's name, batch size and problem.
Divided = Mapping[tuple[str, int, ConvProblem], TunedProblem | str]


@dataclass(frozen=True, slots=True)
class Contests:
    """The settings and resources shared by all contests; a contest times one problem's contestants, interleaved.

    variants: torch's variants, by name. divided: the choices for the whole table, by policy and budget.
    """

    config: Config
    machine: Machine
    database: Database
    variants: Mapping[str, Runner]
    choices: Choices
    priors: Priors = field(default_factory=dict)
    divided: Mapping[tuple[BatchSizePolicy, int], Divided] = field(default_factory=dict)

    def rows(
        self, layer: Layer, problem: ConvProblem, progress: Progress
    ) -> tuple[list[Row], list[tuple[Subject, list[TunedProblem]]]]:
        """Time all contestants on an operation of a layer in each dtype and memory format; return rows and choices.

        A contestant that cannot run gets a row with the reason. Raises ``KeyboardInterrupt``.
        """
        problems = self.choices.of(problem)
        chosen = [
            self._chosen(layer, one, share_of(progress, 0.9 * index / len(problems), 0.9 / len(problems)))
            for index, one in enumerate(problems)
        ]
        progress(f"{layer.name}, {problem}: in turns", 0.9)
        calls = [self._calls(layer, one, _tuned(each)) for one, each in zip(problems, chosen, strict=True)]
        rows, tunings = list[Row](), []
        for one, each, times in zip(problems, chosen, self._timed(calls), strict=True):
            subject = subject_of(layer, one)
            tunings.append((subject, _tuned(each)))
            rows += [*self._torchs(subject, times, _tuned(each)), *_ours(subject, times, each)]
        return [replace(row, more={**row.more, "count": layer.count}) for row in rows], tunings

    def _chosen(self, layer: Layer, problem: ConvProblem, progress: Progress) -> _Chosen:
        """Return mucudnn's choices for a problem; the best undivided algorithm is chosen under each limit, too."""
        policies = dict.fromkeys((BatchSizePolicy.UNDIVIDED, *self.choices.policies))
        wanted = [*product(policies, self.choices.limits)]
        chosen: dict[_Choice, tuple[TunedProblem | str, float | None]] = {}
        for index, (policy, limit) in enumerate(wanted):
            contestant = UNDIVIDED if policy is BatchSizePolicy.UNDIVIDED else OURS
            start_s, part = self.machine.clock.now(), share_of(progress, index / len(wanted), 1 / len(wanted))
            tuned = self._choose(layer, problem, policy, limit, part)
            chosen[contestant, policy, limit] = tuned, self.machine.clock.now() - start_s
        for (policy, budget), divided in self.divided.items():
            chosen[DIVIDED, policy, budget] = divided[layer.name, layer.batch_size, problem], None
        return chosen

    def _choose(
        self, layer: Layer, problem: ConvProblem, policy: BatchSizePolicy, limit: int | None, progress: Progress
    ) -> TunedProblem | str:
        config = replace(self.config, policy=policy, workspace_limit=limit)
        name = f"{layer.name}, {problem}"
        task = Task(problem, layer.batch_size, limit, layer.count, name, baseline_exempt=config.baseline_exempt)
        try:
            return self.tune([task], config, progress).problems[0]
        except InfeasibleError as error:
            return " ".join(str(error).split())
        except CANDIDATE_ERRORS as error:
            return first_line(error)

    def tune(self, tasks: Sequence[Task], config: Config, progress: Progress) -> Tuning:
        """Tune tasks on this machine with this database. Raises the errors of ``tune``."""
        return tune_tasks(
            tasks, config, progress=progress, machine=self.machine, database=self.database, priors=self.priors
        )

    def _calls(
        self, layer: Layer, problem: ConvProblem, tunings: Sequence[TunedProblem]
    ) -> dict[_Call, Contestant | Exception]:
        """Return the calls of torch's variants and of the configurations, each once, or why they cannot run."""
        configurations = {_call_of(one.configuration): one.configuration for one in tunings}
        try:
            operands = training_operands(problem, layer.batch_size, self.machine.device)
            ours: dict[_Call, Contestant | Exception] = {
                call: Contestant(self.machine.whole_run(problem, one, operands, keeps_workspace=True))
                for call, one in configurations.items()
                if not one.is_baseline
            }
        except CANDIDATE_ERRORS as error:  # There is not enough memory for the mini-batch.
            return dict.fromkeys((*self.variants, *configurations), error)
        barred = next((one.barred.reason for one in tunings if one.barred is not None), "")
        run_torch = partial(self.machine.run_torch, problem, operands)
        return {
            name: UnsoundError(barred) if barred else Contestant(run_torch, run) for name, run in self.variants.items()
        } | ours

    def _timed(self, calls: Sequence[Mapping[_Call, Contestant | Exception]]) -> list[_Times]:
        """Time the calls of one problem in all its dtypes and memory formats, interleaved."""
        contestants = [call for each in calls for call in each.values() if isinstance(call, Contestant)]
        rounds = Rounds(self.choices.rounds, max(self.choices.rounds, MOST_ROUNDS), SHORT_S)
        times = iter(try_in_turns(contestants, rounds, self.machine.clock) if contestants else ())
        return [
            {name: next(times) if isinstance(call, Contestant) else call for name, call in each.items()}
            for each in calls
        ]

    def _torchs(self, subject: Subject, times: _Times, tunings: Sequence[TunedProblem]) -> Iterator[Row]:
        measured = {m.micro_config: m for tuned in tunings for m in tuned.measurements}
        baseline = measured.get(MicroConfig(TORCHS_OWN, subject["batch_size"]))
        error = None if baseline is None else baseline.relative_error
        least_s = next((one.least_baseline_s for one in tunings if one.barred is not None), None)
        for name in self.variants:
            yield _row(Row(subject, name, relative_error=error, more={"least_s": least_s}), times[name])


def _tuned(chosen: _Chosen) -> list[TunedProblem]:
    return [tuned for tuned, _ in chosen.values() if isinstance(tuned, TunedProblem)]


def _call_of(configuration: Configuration) -> _Call:
    return TORCH if configuration.is_baseline else configuration.micro_configs


def subject_of(layer: Layer, problem: ConvProblem) -> Subject:
    """Return the columns that identify the result row of a layer's problem."""
    return {"layer": layer.name, **problem_columns(problem, layer.batch_size)}


def _ours(subject: Subject, times: _Times, chosen: _Chosen) -> Iterator[Row]:
    for (contestant, policy, limit), (tuned, tuning_s) in chosen.items():
        row = Row(subject, contestant, policy=str(policy), limit_bytes=limit, more={"tuning_s": tuning_s})
        if isinstance(tuned, str):
            yield replace(row, failure=tuned)
            continue
        row = replace(
            row,
            configuration=str(tuned.configuration),
            workspace_bytes=tuned.configuration.workspace_bytes,
            relative_error=tuned.relative_error,
            more={
                **row.more,
                "predicted_s": tuned.configuration.time_s,
                "tuned_s": tuned.time_s,
                "reason": tuned.reason,
                "solve_s": tuned.account and tuned.account.solve_time_s,
            },
        )
        yield _row(row, times[_call_of(tuned.configuration)])


def _row(row: Row, time: _Time) -> Row:
    """Add the time samples, or the reason why there are none, to a row."""
    if isinstance(time, tuple):
        return replace(row, samples_s=time)
    return replace(row, failure=first_line(time))


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


_KIND = ["dtype", "memory_format"]
_CONTESTANT = ["contestant", "policy", "limit_bytes"]


def convolutions_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table of the layers if mucudnn chose under one policy and limit, a summary, and texts.

    The last text compares PyTorch with mucudnn, each in the better memory format.
    """
    rows = measured(folder)
    ours = _choices_rows(rows)
    if len(ours[_CONTESTANT].drop_duplicates()) == 1:
        yield _layers_table(folder, rows)
    yield summary_table(summary_rows(rows))
    yield left_out_in_words(folder)
    for name, failed in rows[rows["failure"].notna()].groupby("contestant", sort=False):
        yield f"{shown_name(str(name))}: no time in {len(failed)} rows, as {failed['failure'].iloc[0]}"
    timed = ours.dropna(subset=["time_s"])
    if len(timed):
        errors = (timed["predicted_s"].astype(float) / timed["time_s"] - 1).abs()
        yield f"predicted against measured time: median error {errors.median():.1%}"
    dtypes = list(rows["dtype"].unique())
    for dtype in dtypes:
        told = _in_words(rows[rows["dtype"] == dtype])
        yield f"{dtype}: {told}" if told and len(dtypes) > 1 else told


def _choices_rows(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return the rows of mucudnn's choices, without those of undivided algorithms."""
    return rows[rows["policy"].notna() & (rows["contestant"] != UNDIVIDED)]


def _layers_table(folder: ResultFolder, rows: pandas.DataFrame) -> Table:
    """Return a table of the times of each layer and operation, with columns for each dtype and memory format."""
    kinds = [*rows[_KIND].drop_duplicates().itertuples(index=False, name=None)]
    names = list(rows["contestant"].unique())
    columns = ["count"]
    for dtype, memory_format in kinds:
        of = memory_format if rows["dtype"].nunique() == 1 else f"{dtype} {memory_format}"
        columns += [*(f"{shown_name(name)} ms {of}" for name in names), "speedup"]
    title = f"{folder.header.source}, batch {', '.join(map(str, folder.header.settings['batch_sizes']))}"
    printed = new_table(title, ("layer", "operation", "faster configuration"), columns)
    keys = ["turns", *_KIND, "contestant"]
    found = dict(zip(rows[keys].itertuples(index=False, name=None), rows.to_dict("records"), strict=True))
    for turns in rows["turns"].unique():
        every = [[found[turns, *kind, name] for name in names] for kind in kinds]
        faster = min((each[-1] for each in every), key=lambda row: np.nan_to_num(row["time_s"], nan=np.inf))
        left = [_known(faster[key], str) for key in ("layer", "operation", "configuration")]
        printed.add_row(*left, f"{faster['count']:.0f}", *(cell for each in every for cell in _cells(each)))
    printed.caption = "same: the best undivided configuration is mucudnn's, and was timed once"
    return printed


def _cells(rows: Sequence[Mapping[Hashable, Any]]) -> Iterator[str]:
    """Yield the times of a problem's contestants, mucudnn last, and its speedup."""
    ours = rows[-1]
    for row in rows:
        is_same = row["contestant"] == ours["same_as"]
        yield "same" if is_same else _known(row["time_s"], milliseconds)
    yield _known(ours["speedup"], ratio)


def _known(value: Any, written: Callable[[Any], str]) -> str:
    return "" if pandas.isna(value) else written(value)


def _in_words(rows: pandas.DataFrame) -> str:
    """Compare the totals of PyTorch and mucudnn, each in its better memory format and under its best limit.

    Limits under which more problems have no choice than under others do not count, nor problems without a time of each;
    the text is empty if there are none.
    """
    choice, ours = ["memory_format", *_CONTESTANT], _choices_rows(rows)
    timed = ours.groupby(choice, dropna=False)["time_s"].transform("count")
    torchs = rows[rows["contestant"] == TORCH]
    torchs = torchs.assign(time_s=torchs["time_s"].fillna(torchs["least_s"].astype(float)))
    rows = pandas.concat([torchs, ours[timed == timed.max()]])
    rows = rows[rows["time_s"].notna().groupby(rows["turns"]).transform("all")]
    rows = rows.assign(s=rows["count"] * rows["time_s"])
    total_s = rows.groupby(choice, dropna=False)["s"].sum().reset_index()
    is_torch = total_s["contestant"] == TORCH
    if is_torch.all() or not is_torch.any():
        return ""
    more = "" if rows["samples_s"].map(len).all() else "more than "
    busy = rows[rows["load"] > BUSY]["turns"].nunique()
    doubt = f" ({busy} problems were measured while others took more than {BUSY:.0%} of the machine)" if busy else ""
    speedup = total_s[is_torch]["s"].min() / total_s[~is_torch]["s"].min()
    return f"better PyTorch / better mucudnn: {more}{ratio(speedup)}{doubt}"


def left_out_in_words(folder: ResultFolder) -> str:
    """Return a line for each reason why problems were not measured, with their number and examples.

    The text is empty if every problem was measured.
    """
    return "\n".join(
        f"left out: {len(left)} problem{'' if len(left) == 1 else 's'}, as {reason}: {listed(left, 3, '; ')}"
        for reason, left in folder.left_out_by_reason.items()
    )
