"""Times of dividing workspace budgets over a network's problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import write_missing
from mucudnn.bench.report.records import config_record
from mucudnn.bench.sources.layers import LayerTable
from mucudnn.bench.sources.table_tuning import table_tasks
from mucudnn.database.database import Database
from mucudnn.measuring.whole_runs import Machine
from mucudnn.solver.division import solve_wd
from mucudnn.tuning.divide import Divided
from mucudnn.tuning.tuner import Priors, machine_and_database, tune_tasks
from mucudnn.words.config import DEFAULT_WORKSPACE_LIMIT, BatchSizePolicy, Config
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.progress import Progress, silent

ROUNDS = 5
SOLVER = "solver"  # the contestant


def benchmark_division(
    table: LayerTable,
    config: Config,
    policies: Sequence[BatchSizePolicy],
    budgets: Sequence[int],
    out: Path,
    *,
    rounds: int = ROUNDS,
    device: str = "cpu",
    progress: Progress = silent,
    machine: Machine | None = None,
    database: Database | None = None,
) -> None:
    """Time dividing each workspace budget (bytes) under each policy, ``rounds`` times; write rows into ``out``.

    Problems that the database lacks are measured first. config: its policy and memory limits are ignored. machine,
    database: as for ``tune``. Raises the errors of ``open_folder`` and ``tune``.
    """
    chosen = [
        replace(config, policy=policy, workspace_limit=DEFAULT_WORKSPACE_LIMIT, workspace_budget=budget)
        for policy in policies
        for budget in budgets
    ]
    settings = {
        **config_record(replace(config, workspace_limit=None)),
        "batch_sizes": sorted({layer.batch_size for layer in table.layers}),
        "dtype": table.layers[0].problem.dtype,
        "policy": list(dict.fromkeys(str(one.policy) for one in chosen)),
        "workspace_budget": list(dict.fromkeys(one.workspace_budget_bytes for one in chosen)),
        "rounds": rounds,
    }
    priors: Priors = {}

    def rows_of(one: Config, subject: Subject, progress: Progress) -> list[Row]:
        row = Row(subject, SOLVER, policy=str(one.policy), limit_bytes=one.workspace_budget_bytes)
        tasks = table_tasks(table, one)
        try:
            tuning = tune_tasks(tasks, one, progress=progress, machine=on, database=opened, priors=priors)
        except InfeasibleError as error:
            return [replace(row, failure=" ".join(str(error).split()))]
        return [] if tuning.divided is None else [_timed(row, tuning.divided, rounds)]

    wanted = {
        (table.source, f"{one.policy}, workspace budget {one.workspace_budget_bytes}"): partial(rows_of, one)
        for one in chosen
    }
    with machine_and_database(config, device, machine, database) as (on, opened):
        header = Header("program", table.source, settings, on.environment, ("network", "choices"), len(wanted))
        write_missing(out, header, wanted, progress)


def _timed(row: Row, divided: Divided, rounds: int) -> Row:
    """Add the solver's seconds, timed after a warm-up, and its statistics of the solution to a row."""
    counts = divided.division.counts
    every = [solve_wd(divided.options, row.limit_bytes, counts=counts) for _ in range(rounds + 1)]
    last = every[-1]
    told = ("options", "undominated_options", "remaining_options", "gap", "status", "solver", "objective_s")
    return replace(
        row,
        samples_s=[one.solve_time_s for one in every[1:]],
        workspace_bytes=last.workspace_bytes,
        more={"problems": len(last.assignment), **{name: getattr(last, name) for name in told}},
    )
