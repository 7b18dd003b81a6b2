"""Interleaved timing of a table's convolutions: torch's, mucudnn's best undivided algorithm, and its configurations.

A run that was interrupted or reached its time limit can be resumed in the same folder. Configurations that divide a
budget over the whole table are timed together with those chosen for each problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from mucudnn.bench.results.reading import (
    MEASUREMENTS_FILE,
    PROBLEM_COLUMNS,
    Header,
    ResultFolder,
    Subject,
    problem_columns,
)
from mucudnn.bench.results.variants import TORCH, shown_name
from mucudnn.bench.results.writing import Row, config_record, open_folder
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.sources.table_tuning import problems_to_tune, table_tasks
from mucudnn.bench.suites.shared.timing import failed, time_in_turns, torch_variants, with_samples
from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import DEFAULT_WORKSPACE_LIMIT, BatchSizePolicy, Config
from mucudnn.core.errors import CANDIDATE_ERRORS, InfeasibleError, UnsoundError, first_line
from mucudnn.core.files import whole_text
from mucudnn.core.problem import ConvProblem, MemoryFormat
from mucudnn.core.records import BUSY, Configuration, MicroConfig, Task
from mucudnn.core.tables import Table, listed, milliseconds, new_table, ratio
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_seconds
from mucudnn.measuring.heap import kept_heap
from mucudnn.measuring.turns import Rounds, Runner, Timer
from mucudnn.measuring.whole_runs import Machine, training_operands
from mucudnn.store.database import Database
from mucudnn.store.exports import export_json_lines
from mucudnn.tuning.job import expected_s
from mucudnn.tuning.result import Tuning
from mucudnn.tuning.tuner import machine_and_database, tune_tasks

UNDIVIDED, OURS, DIVIDED = "undivided", "mucudnn", "mucudnn-wd"  # contestants; the last one has a budget

_Wanted = tuple[Layer, ConvProblem]
_Choice = tuple[str, BatchSizePolicy, int | None]  # contestant, policy, limit or budget in bytes
_Call = str | tuple[MicroConfig, ...]  # a variant of torch, or the micro-batches of a configuration

ROUNDS = 15
# Short calls are sampled for SHORT_S seconds by default, which reduces the noise between two runs to a few percent.
MOST_ROUNDS, SHORT_S = 81, 0.5


@dataclass(frozen=True, slots=True)
class Compared:
    """What a run compares.

    policies: mucudnn chooses under each of them, and under each limit.
    limits: workspace limits in bytes, None for no limit.
    budgets: bytes, each also divided over the whole table.
    dtypes: timed interleaved for each problem; if empty, the table's own.
    memory_formats: the same of memory formats.
    rounds: time samples of each contestant; short calls get more, up to ``MOST_ROUNDS``.
    short_s: seconds of samples of each contestant, after ``rounds``.
    time_limit_s: a problem is started only if it is expected to finish by then; None for no time limit. A resumed run
    may have another.
    """

    policies: tuple[BatchSizePolicy, ...] = (BatchSizePolicy.POWER_OF_TWO,)
    limits: tuple[int | None, ...] = (None,)
    budgets: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    memory_formats: tuple[MemoryFormat, ...] = ()
    rounds: int = ROUNDS
    short_s: float = SHORT_S
    time_limit_s: float | None = None

    def of(self, problem: ConvProblem) -> list[ConvProblem]:
        """Return a problem in each dtype and memory format."""
        kinds = product(self.dtypes or (problem.dtype,), self.memory_formats or (problem.memory_format,))
        return [replace(problem, dtype=dtype, memory_format=memory_format) for dtype, memory_format in kinds]


@dataclass(frozen=True, slots=True)
class Contests:
    """The settings and resources shared by all contests; a contest times one problem's contestants, interleaved.

    tune: ``tune_tasks`` on the machine, with its database.
    variants: torch's variants, by name.
    divided: under each policy and budget, the choice for the layer's name, batch size and problem, or why there is
    none.
    """

    config: Config
    machine: Machine
    tune: Callable[..., Tuning]
    variants: Mapping[str, Runner]
    compared: Compared
    divided: dict[tuple[BatchSizePolicy, int], dict[tuple[str, int, ConvProblem], TunedProblem | str]] = field(
        default_factory=dict
    )

    def rows(self, layer: Layer, problem: ConvProblem, progress: Progress) -> list[Row]:
        """Time all contestants on an operation of a layer in each dtype and memory format; return their rows.

        A contestant that cannot run gets a row with the reason. Raises ``KeyboardInterrupt``.
        """
        # Choose in each dtype and memory format.
        problems = self.compared.of(problem)
        entries: list[tuple[Row, Timer | None]] = []
        for index, stored in enumerate(problems):
            entries += self._entries(
                layer, stored, share_of(progress, 0.9 * index / len(problems), 0.9 / len(problems))
            )
        # Time each call once, however many rows show it.
        progress(f"{layer.name}, {problem}: in turns", 0.9)
        timers = dict.fromkeys(timer for _, timer in entries if timer is not None and timer.stop is None)
        rounds = self.compared.rounds
        time_in_turns([*timers], Rounds(rounds, max(rounds, MOST_ROUNDS), self.compared.short_s))
        return [row if timer is None else with_samples(row, timer) for row, timer in entries]

    def _entries(self, layer: Layer, problem: ConvProblem, progress: Progress) -> list[tuple[Row, Timer | None]]:
        """Return the rows of a problem's contestants without samples, each with the timer of its call.

        Rows of contestants without a choice have no timer.
        """
        subject, n = subject_of(layer, problem), layer.batch_size
        chosen = self._chosen(layer, problem, progress)
        tunings = [tuned for tuned, _ in chosen.values() if isinstance(tuned, TunedProblem)]
        timers = self._timers(problem, n, tunings)
        # PyTorch's own variants.
        errors = {m.micro_config: m.relative_error for tuned in tunings for m in tuned.measurements}
        error = errors.get(MicroConfig(TORCHS_OWN, n))
        least_s = next((tuned.least_baseline_s for tuned in tunings if tuned.barred is not None), None)
        more: dict[str, Any] = {"least_s": least_s, "count": layer.count}
        entries: list[tuple[Row, Timer | None]] = [
            (Row(subject, name, relative_error=error, more=more), timers[name]) for name in self.variants
        ]
        # What mucudnn chose, or why it chose nothing.
        for (contestant, policy, limit), (tuned, tuning_s) in chosen.items():
            more = {"tuning_s": tuning_s, "count": layer.count}
            row = Row(subject, contestant, policy=str(policy), limit_bytes=limit, more=more)
            if isinstance(tuned, str):
                entries.append((replace(row, failure=tuned), None))
                continue
            row = replace(
                row,
                configuration=str(tuned.configuration),
                workspace_bytes=tuned.configuration.workspace_bytes,
                relative_error=tuned.relative_error,
                more={
                    **more,
                    "predicted_s": tuned.configuration.time_s,
                    "tuned_s": tuned.time_s,
                    "reason": tuned.reason,
                    "solve_s": tuned.account and tuned.account.solve_time_s,
                },
            )
            entries.append((row, timers[_call_of(tuned.configuration)]))
        return entries

    def _chosen(
        self, layer: Layer, problem: ConvProblem, progress: Progress
    ) -> dict[_Choice, tuple[TunedProblem | str, float | None]]:
        """Return mucudnn's choices for a problem, or why there is none, each with the seconds of its tuning.

        The best undivided algorithm is chosen under each limit, too.
        """
        wanted = [*product(dict.fromkeys((BatchSizePolicy.UNDIVIDED, *self.compared.policies)), self.compared.limits)]
        chosen: dict[_Choice, tuple[TunedProblem | str, float | None]] = {}
        for index, (policy, limit) in enumerate(wanted):
            contestant = UNDIVIDED if policy is BatchSizePolicy.UNDIVIDED else OURS
            start_s, part = self.machine.clock.now(), share_of(progress, index / len(wanted), 1 / len(wanted))
            config = replace(self.config, policy=policy, workspace_limit=limit)
            task = Task(
                problem,
                layer.batch_size,
                limit,
                layer.count,
                name=f"{layer.name}, {problem}",
                baseline_exempt=config.baseline_exempt,
            )
            try:
                tuned: TunedProblem | str = self.tune([task], config, progress=part).problems[0]
            except InfeasibleError as error:
                tuned = " ".join(str(error).split())
            except CANDIDATE_ERRORS as error:
                tuned = first_line(error)
            chosen[contestant, policy, limit] = tuned, self.machine.clock.now() - start_s
        for (policy, budget), divided in self.divided.items():
            chosen[DIVIDED, policy, budget] = divided[layer.name, layer.batch_size, problem], None
        return chosen

    def _timers(self, problem: ConvProblem, n: int, tunings: Sequence[TunedProblem]) -> dict[_Call, Timer]:
        """Return timers of torch's variants and of the configurations, each once; those that cannot run have failed."""
        configurations = {_call_of(tuned.configuration): tuned.configuration for tuned in tunings}
        clock, timers = self.machine.clock, dict[_Call, Timer]()
        try:
            operands = training_operands(problem, n, self.machine.device)
            for call, configuration in configurations.items():
                if not configuration.is_baseline:
                    run = self.machine.whole_run(problem, configuration, operands, keeps_workspace=True)
                    timers[call] = Timer(run, clock, clock.every_round)
        except CANDIDATE_ERRORS as error:  # There is not enough memory for the mini-batch.
            return dict.fromkeys((*self.variants, *configurations), failed(error))
        run_torch = partial(self.machine.run_torch, problem, operands)
        barred = next((tuned.barred for tuned in tunings if tuned.barred is not None), None)
        for name, runner in self.variants.items():
            timer = Timer(run_torch, clock, clock.every_round, runner=runner)
            timers[name] = timer if barred is None else failed(UnsoundError(barred.reason))
        return timers

    def divide(self, table: LayerTable, progress: Progress) -> None:
        """Divide each budget over all problems of a table under each policy, in each dtype and memory format by itself.

        Raises the errors of ``tune``.
        """
        kinds = zip(*(self.compared.of(layer.problem) for layer in table.layers), strict=True)
        wanted = [*product(self.compared.policies, self.compared.budgets, kinds)]
        for index, (policy, budget, problems) in enumerate(wanted):
            pairs = zip(table.layers, problems, strict=True)
            stored = replace(table, layers=tuple(replace(layer, problem=problem) for layer, problem in pairs))
            config = replace(
                self.config, policy=policy, workspace_limit=DEFAULT_WORKSPACE_LIMIT, workspace_budget=budget
            )
            names = [(layer.name, layer.batch_size, problem) for layer, problem in problems_to_tune(stored, config)]
            part = share_of(progress, index / len(wanted), 1 / len(wanted))
            choices = self.divided.setdefault((policy, budget), {})
            try:
                tuning = self.tune(table_tasks(stored, config), config, progress=part)
                choices.update(zip(names, tuning.problems, strict=True))
            except InfeasibleError as error:
                choices.update(dict.fromkeys(names, " ".join(str(error).split())))


def _call_of(configuration: Configuration) -> _Call:
    return TORCH if configuration.is_baseline else configuration.micro_configs


def subject_of(layer: Layer, problem: ConvProblem) -> Subject:
    """Return the columns that identify the result row of a layer's problem."""
    return {"layer": layer.name, **problem_columns(problem, layer.batch_size)}


def benchmark_convolutions(
    table: LayerTable,
    config: Config,
    compared: Compared,
    out: Path,
    *,
    device: str = "cpu",
    progress: Progress = silent,
    machine: Machine | None = None,
    database: Database | None = None,
) -> None:
    """Time the convolution problems of a table; write rows into the folder ``out``, skipping problems it already has.

    With a time limit, kinds of layers alternate, and problems that do not fit are left out with the reason; without
    one, problems are measured in the order of the table.

    config: its policy, limit and budget are ignored.
    machine: by default this one.
    database: by default the config's file.

    Raises the errors of ``open_folder`` and ``tune``. On ``KeyboardInterrupt``, everything measured so far is in the
    folder.
    """
    wanted = problems_to_tune(table, config)
    limit_s = compared.time_limit_s
    with (
        machine_and_database(config, device, machine, database) as (on, opened),
        torch_variants(on.device) as variants,
        kept_heap(),
        open_folder(out, _header(table, config, compared, on)) as folder,
    ):
        tune = partial(tune_tasks, machine=on, database=opened, priors={})
        contests = Contests(config, on, tune, variants, compared)
        # What the folder has, and what it lacks.
        left = {
            (layer, problem): "the run was stopped before"
            for layer, problem in wanted
            if not all(folder.known(subject_of(layer, stored)) for stored in compared.of(problem))
        }
        met = [pair for pair in wanted if pair not in left]
        try:
            if left and compared.budgets:
                contests.divide(table, share_of(progress, 0.0, 0.5))
                progress = share_of(progress, 0.5, 0.5)
            # Measure one problem after the other, as far as the time limit goes.
            end_s = inf if limit_s is None else on.clock.now() + limit_s
            expected = {(layer, problem): expected_s(problem, layer.batch_size) for layer, problem in left}
            ratio_s, ratios, count = 0.0, list[float](), len(left)  # of measured to expected seconds; 0: none is known
            while fitting := [pair for pair in left if on.clock.now() + ratio_s * expected[pair] <= end_s]:
                pair = fitting[0] if limit_s is None else least_met(fitting, met)
                begun_s, mark = on.clock.now(), on.watch.mark()
                rows = contests.rows(*pair, share_of(progress, 1 - len(left) / count, 1 / count))
                folder.add(rows, on.watch.since(mark))
                del left[pair]
                met.append(pair)
                ratios.append((on.clock.now() - begun_s) / expected[pair])
                ratio_s = median(ratios)
            if limit_s is not None:
                left = dict.fromkeys(left, f"the {format_seconds(limit_s)} would not have sufficed")
        finally:
            with whole_text(out / MEASUREMENTS_FILE) as stream:
                problems = {stored for _, problem in wanted for stored in compared.of(problem)}
                export_json_lines(opened, stream, on.environment, problems)
            folder.write_summary((f"{layer.name}, {problem}", reason) for (layer, problem), reason in left.items())
        folder.improve_limits({dtype: MachineLimits.measured(on.device, dtype) for dtype in folder.header.limits})


def least_met(left: Iterable[_Wanted], met: Iterable[_Wanted]) -> _Wanted:
    """Return the problem whose kind of layer and operation were met least so far, and of these that of fewest FLOPs."""
    kinds: Counter[object] = Counter()
    for _, problem in met:
        kind, operation = kind_of_layer(problem), problem.operation
        kinds.update((kind, operation, (kind, operation)))

    def often_met(wanted: _Wanted) -> tuple[int, int, int]:
        layer, problem = wanted
        kind, operation = kind_of_layer(problem), problem.operation
        return kinds[kind] + kinds[operation], kinds[kind, operation], problem.flops(layer.batch_size)

    return min(left, key=often_met)


def _header(table: LayerTable, config: Config, compared: Compared, machine: Machine) -> Header:
    kinds = compared.of(table.layers[0].problem)
    dtypes = [*dict.fromkeys(kind.dtype for kind in kinds)]
    return Header(
        "convolutions",
        table.source,
        {
            **config_record(config),
            "batch_sizes": sorted({layer.batch_size for layer in table.layers}),
            "layers": [layer.name for layer in table.layers],
            "dtype": dtypes,
            "memory_format": [*dict.fromkeys(str(kind.memory_format) for kind in kinds)],
            "rounds": compared.rounds,
            "policy": [str(policy) for policy in compared.policies],
            "workspace_limit": list(compared.limits),
            "workspace_budget": list(compared.budgets) or None,
        },
        machine.environment,
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=len(table.problems(config.operations)) * len(kinds),
        limits={dtype: MachineLimits.measured(machine.device, dtype) for dtype in dtypes},
    )


_KIND = ["dtype", "memory_format"]
_CONTESTANT = ["contestant", "policy", "limit_bytes"]


def convolutions_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table of the layers if mucudnn chose under one policy and limit, a summary, and texts.

    The last text compares PyTorch with mucudnn, each in the better memory format.
    """
    rows = measured(folder)
    choices = _choices_rows(rows)
    if len(choices[_CONTESTANT].drop_duplicates()) == 1:
        yield _layers_table(folder, rows)
    yield summary_table(summary_rows(rows))
    yield left_out_in_words(folder)
    for name, untimed in rows[rows["failure"].notna()].groupby("contestant", sort=False):
        yield f"{shown_name(str(name))}: no time in {len(untimed)} rows, as {untimed['failure'].iloc[0]}"
    timed = choices.dropna(subset=["time_s"])
    if len(timed):
        error = (timed["predicted_s"].astype(float) / timed["time_s"] - 1).abs().median()
        yield f"predicted against measured time: median error {error:.1%}"
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
        kind = memory_format if rows["dtype"].nunique() == 1 else f"{dtype} {memory_format}"
        columns += [*(f"{shown_name(name)} ms {kind}" for name in names), "speedup"]
    printed = new_table(
        f"{folder.header.source}, batch {', '.join(map(str, folder.header.settings['batch_sizes']))}",
        ("layer", "operation", "faster configuration"),
        columns,
    )
    for _, group in rows.groupby("turns", sort=False):
        calls = group.set_index([*_KIND, "contestant"], drop=False).to_dict("index")
        chosen_rows = group[group["contestant"] == names[-1]]
        faster = chosen_rows.loc[chosen_rows["time_s"].fillna(np.inf).idxmin()]
        cells = [_known(faster[key], str) for key in ("layer", "operation", "configuration")]
        cells.append(f"{faster['count']:.0f}")
        for kind in kinds:
            chosen = calls[*kind, names[-1]]
            for name in names:
                is_same = name == chosen["same_as"]
                cells.append("same" if is_same else _known(calls[*kind, name]["time_s"], milliseconds))
            cells.append(_known(chosen["speedup"], ratio))
        printed.add_row(*cells)
    printed.caption = "same: the best undivided configuration is mucudnn's, and was timed once"
    return printed


def _known(value: Any, written: Callable[[Any], str]) -> str:
    return "" if pandas.isna(value) else written(value)


def _in_words(rows: pandas.DataFrame) -> str:
    """Compare the totals of PyTorch and mucudnn, each in its better memory format and under its best limit.

    Limits under which more problems have no choice than under others do not count, nor problems without a time of each;
    the text is empty if there are none.
    """
    choice, choices = ["memory_format", *_CONTESTANT], _choices_rows(rows)
    timed = choices.groupby(choice, dropna=False)["time_s"].transform("count")
    torchs = rows[rows["contestant"] == TORCH]
    torchs = torchs.assign(time_s=torchs["time_s"].fillna(torchs["least_s"].astype(float)))
    rows = pandas.concat([torchs, choices[timed == timed.max()]])
    rows = rows[rows["time_s"].notna().groupby(rows["turns"]).transform("all")]
    rows = rows.assign(s=rows["count"] * rows["time_s"])
    total_s = rows.groupby(choice, dropna=False)["s"].sum().reset_index()
    is_torch = total_s["contestant"] == TORCH
    if is_torch.all() or not is_torch.any():
        return ""
    least = "" if rows["samples_s"].map(len).all() else "more than "
    busy = rows[rows["load"] > BUSY]["turns"].nunique()
    doubt = f" ({busy} problems were measured while others took more than {BUSY:.0%} of the machine)" if busy else ""
    speedup = total_s[is_torch]["s"].min() / total_s[~is_torch]["s"].min()
    return f"better PyTorch / better mucudnn: {least}{ratio(speedup)}{doubt}"


def left_out_in_words(folder: ResultFolder) -> str:
    """Return a line for each reason why problems were not measured, with their number and examples.

    The text is empty if every problem was measured.
    """
    return "\n".join(
        f"left out: {len(left)} problem{'' if len(left) == 1 else 's'}, as {reason}: {listed(left, 3, '; ')}"
        for reason, left in folder.left_out.items()
    )
