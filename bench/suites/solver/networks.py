"""Times the division of budgets over a network's measured problems, into a result folder: the paper's program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.report.records import config_record
from mucudnn.bench.sources.layers import LayerTable
from mucudnn.bench.sources.table_tuning import table_tasks
from mucudnn.bench.suites.solver.benchmark import ROUNDS
from mucudnn.database.database import Database
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.environment import Environment
from mucudnn.solver import solve_wd
from mucudnn.tuning.choose import Divided
from mucudnn.tuning.tuner import Priors, machine_and_database, tune_tasks
from mucudnn.words.config import DEFAULT_WORKSPACE_LIMIT, BatchSizePolicy, Config
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.progress import Progress, share_of, silent

CONTESTANT = "solver"


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
    """Divide each budget (bytes) under each policy, ``rounds`` times, into the folder ``out``.

    What is divided is measured first, where the database does not have it. config: its policy and its bounds of memory
    do not count. machine, database: as for ``tune``. Raises what ``open_folder`` and ``tune`` raise.
    """
    wanted = [
        replace(config, policy=policy, workspace_limit=DEFAULT_WORKSPACE_LIMIT, workspace_budget=budget)
        for policy in policies
        for budget in budgets
    ]
    priors: Priors = {}
    with (
        machine_and_database(config, device, machine, database) as (on, opened),
        open_folder(out, _header(table, config, wanted, rounds, on.environment)) as folder,
    ):
        for index, one in enumerate(wanted):
            subject = _subject(table, one)
            if folder.known(subject):
                continue
            row = Row(subject, CONTESTANT, policy=str(one.policy), limit_bytes=one.workspace_budget_bytes)
            part = share_of(progress, index / len(wanted), 1 / len(wanted))
            tasks = table_tasks(table, one)
            try:
                tuning = tune_tasks(tasks, one, progress=part, machine=on, database=opened, priors=priors)
            except InfeasibleError as error:
                folder.add([replace(row, failure=" ".join(str(error).split()))])
            else:
                folder.add([_timed(row, divided, rounds) for divided in (tuning.divided,) if divided is not None])
        folder.write_summary()


def _timed(row: Row, divided: Divided, rounds: int) -> Row:
    """Return the row with the solver's seconds, and the account of what it solved; a first time does not count."""
    counts = divided.division.counts
    every = [solve_wd(divided.options, row.limit_bytes, counts=counts) for _ in range(rounds + 1)]
    last = every[-1]
    return replace(
        row,
        samples_s=[one.solve_time_s for one in every[1:]],
        workspace_bytes=last.workspace_bytes,
        more={
            "problems": len(last.assignment),
            "options": last.options,
            "undominated_options": last.undominated_options,
            "remaining_options": last.remaining_options,
            "gap": last.gap,
            "status": str(last.status),
            "solver": last.solver,
            "objective_s": last.objective_s,
        },
    )


def _subject(table: LayerTable, config: Config) -> Subject:
    choices = f"{config.policy}, workspace budget {config.workspace_budget_bytes}"
    return {"network": table.source, "choices": choices}


def _header(
    table: LayerTable, config: Config, wanted: Sequence[Config], rounds: int, environment: Environment
) -> Header:
    settings = {
        **config_record(replace(config, database=None, workspace_limit=None)),
        "batch_sizes": sorted({layer.batch_size for layer in table.layers}),
        "dtype": table.layers[0].problem.dtype,
        "policy": list(dict.fromkeys(str(one.policy) for one in wanted)),
        "workspace_budget": list(dict.fromkeys(one.workspace_budget_bytes for one in wanted)),
        "rounds": rounds,
    }
    return Header("program", table.source, settings, environment, ("network", "choices"), len(wanted))
