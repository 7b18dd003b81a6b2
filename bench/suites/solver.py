"""Times of the solvers compared with their limits, and of dividing budgets over a network's problems.

The solvers run on synthetic measurements. They compute the fronts of all batch sizes at once, with setup costs and
prepared bytes, and divide one workspace budget over the problems of a network.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import write_missing
from mucudnn.bench.report.records import config_record
from mucudnn.bench.sources.layers import LayerTable
from mucudnn.bench.sources.table_tuning import table_tasks
from mucudnn.database.database import Database
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.environment import current_environment
from mucudnn.solver.division import solve_wd
from mucudnn.solver.external import programs
from mucudnn.solver.front import desirable_sets
from mucudnn.tuning.divide import Divided
from mucudnn.tuning.tuner import Priors, machine_and_database, tune_tasks
from mucudnn.words.config import DEFAULT_WORKSPACE_LIMIT, BatchSizePolicy, Config
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.progress import Progress, silent
from mucudnn.words.results import Configuration, Measurement, MicroConfig
from mucudnn.words.units import format_seconds

ROUNDS = 5
ALGORITHMS = 8
BUDGETS = (0.02, 0.1, 0.3, 0.6)  # from the smallest feasible budget (0) to the largest that makes a difference (1)
OURS, SOLVER = "mucudnn", "solver"  # contestants

Options = dict[str, list[Configuration]]


def benchmark_solvers(out: Path) -> None:
    """Time all solvers; write rows into the folder ``out``, skipping solvers that it already has.

    The first call of each solver is a warm-up, because it imports libraries. Raises the errors of ``open_folder``.
    """

    def rows_of(samples_s: Callable[[], list[float]], bar_s: float, subject: Subject, progress: Progress) -> list[Row]:
        return [Row(subject, OURS, samples_s(), more={"bar_s": bar_s})]

    settings = {"program": programs()[0]}
    header = Header("solver", "made-up measurements", settings, current_environment(), ("what",), len(_WANTED))
    write_missing(out, header, {(what,): partial(rows_of, *how) for what, how in _WANTED.items()})


def solver_tables(folder: ResultFolder) -> Iterator[str]:
    """Yield a line of times for each solver, and the name of the external integer programming solver."""
    for row in folder.rows.to_dict("records"):
        median_s, slowest_s, bar_s = map(format_seconds, (row["time_s"], max(row["samples_s"]), row["bar_s"]))
        yield f"{row['what']}: {median_s}, slowest {slowest_s} (bar {bar_s})"
    yield f"integer programs are solved by {folder.header.settings['program']}"


def time_front(batch_size: int) -> list[float]:
    """Return the seconds per round of computing the fronts (time against workspace) up to this batch size."""
    measurements = made_up_measurements(batch_size)
    return [_seconds(partial(desirable_sets, measurements, batch_size)) for _ in range(ROUNDS + 1)][1:]


def time_division(problems: int, configurations: int) -> list[float]:
    """Return the seconds of each division of a workspace budget over a network's problems.

    Each round has a different synthetic network, and tries every budget.
    """
    solve_wd(made_up_options(problems, configurations, seed=0), 2**30)
    times = []
    for seed in range(1, ROUNDS + 1):
        options = made_up_options(problems, configurations, seed)
        times += [_seconds(partial(solve_wd, options, budget)) for budget in budgets(options)]
    return times


def made_up_measurements(batch_size: int) -> list[Measurement]:
    """Return synthetic measurements of algorithms, where faster ones need more setup time and workspace.

    Step times are nearly linear in the micro-batch size.
    """
    source = random.Random(0)
    rows = []
    for number in range(ALGORITHMS):
        setup_s, prepared = number * 1e-4 * source.random(), number * 2**16
        for size in range(1, batch_size + 1):
            step_s = 2e-5 + size * 1e-4 / (1 + number) * source.uniform(0.9, 1.1)
            rows.append(
                Measurement(MicroConfig(f"a{number}", size), setup_s, step_s, prepared, number * size * 2**14, 0.0)
            )
    return rows


def made_up_options(problems: int, configurations: int, seed: int) -> Options:
    """Return synthetic configurations of problems of very different sizes, with diminishing returns of workspace."""
    source = random.Random(seed)
    options: Options = {}
    for problem in range(problems):
        time_s, workspace = source.uniform(1e-3, 1e-1), 2.0 ** source.uniform(16, 27)
        shares = [source.random() for _ in range(configurations)]
        options[f"problem {problem}"] = [
            Configuration(
                (MicroConfig(f"a{number}", 1),),
                time_s * (0.2 + 0.8 * (1 - share) ** 2 * source.uniform(0.9, 1.1)),
                int(workspace * share * source.uniform(0.9, 1.1)),
            )
            for number, share in enumerate(shares)
        ]
    return options


def budgets(options: Options) -> list[int]:
    """Return workspace budgets in bytes for these options, from tight to ample."""
    workspaces = [[c.workspace_bytes for c in configurations] for configurations in options.values()]
    least, most = sum(map(min, workspaces)), sum(map(max, workspaces))
    return [least + int(share * (most - least)) for share in BUDGETS]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


_WANTED: Mapping[str, tuple[Callable[[], list[float]], float]] = {  # how each solver is timed; its limit in s
    **{
        f"front of every batch size, N={n}, all sizes, {ALGORITHMS} algorithms": (partial(time_front, n), bar_s)
        for n, bar_s in ((256, 0.1), (1024, 1.0))
    },
    **{
        f"WD, {problems} problems x {count} options": (partial(time_division, problems, count), bar_s)
        for problems, count, bar_s in ((159, 20, 0.3), (480, 40, 3.0))
    },
}


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
