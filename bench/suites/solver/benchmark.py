"""Times the solvers on made-up measurements, each time beside its bar.

There are the fronts of every batch size at once, with setup costs and prepared bytes, and the division of one budget
over the problems of a network.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.folders.writing import FolderWriter, folder_if_named
from mucudnn.bench.suites.solver.result import SolverBenchmark, SolverTime
from mucudnn.running.environment import Environment, current_environment
from mucudnn.solver import desirable_sets, solve_wd
from mucudnn.solver.knapsack import programs
from mucudnn.words.results import Configuration, Measurement, MicroConfig

OURS = "mucudnn"


def header_of(wanted: int, environment: Environment) -> Header:
    """Describe a run."""
    return Header("solver", "made-up measurements", {}, environment, subject_columns=("what",), wanted=wanted)


def row_of(time: SolverTime) -> Row:
    return Row({"what": time.what}, OURS, time.samples_s, more={"bar_s": time.bar_s})


def known_time(folder: FolderWriter, what: str) -> SolverTime | None:
    """Return what an earlier run measured; ``None``: nothing."""
    return next((SolverTime.of(what, line["samples_s"], line["bar_s"]) for line in folder.known({"what": what})), None)


ROUNDS = 5
ALGORITHMS = 8
BUDGETS = (0.02, 0.1, 0.3, 0.6)  # between the smallest feasible budget (0) and the largest that matters (1)

Options = dict[str, list[Configuration]]


def benchmark_solvers(out: Path | None = None) -> SolverBenchmark:
    """Time all solvers. A first call of each is not counted, since it loads what it needs.

    out: a result folder, which gets the samples of each; what it has is not measured again. Raises what ``open_folder``
    raises.
    """
    environment = current_environment()
    with folder_if_named(out, header_of(len(_WANTED), environment)) as folder:
        rows = [_known_or_measured(folder, what, *wanted) for what, wanted in _WANTED.items()]
        if folder is not None:
            folder.write_summary()
    return SolverBenchmark(tuple(rows), programs()[0], environment, datetime.now(UTC))


def _known_or_measured(
    folder: FolderWriter | None, what: str, samples_s: Callable[[], list[float]], bar_s: float
) -> SolverTime:
    if folder is None:
        return SolverTime.of(what, samples_s(), bar_s)
    if (known := known_time(folder, what)) is not None:
        return known
    found = SolverTime.of(what, samples_s(), bar_s)
    folder.add([row_of(found)])
    return found


def time_front(batch_size: int) -> list[float]:
    """Return seconds of the front of every batch size up to this one."""
    measurements = made_up_measurements(batch_size)
    return [_seconds(partial(desirable_sets, measurements, batch_size)) for _ in range(ROUNDS + 1)][1:]


def time_division(problems: int, configurations: int) -> list[float]:
    """Return seconds of workspace division. The rounds are different networks, each with every budget."""
    solve_wd(made_up_options(problems, configurations, seed=0), 2**30)
    times = []
    for seed in range(1, ROUNDS + 1):
        options = made_up_options(problems, configurations, seed)
        times += [_seconds(partial(solve_wd, options, budget)) for budget in budgets(options)]
    return times


def made_up_measurements(batch_size: int) -> list[Measurement]:
    """Measurements of algorithms that are the faster, the more setup, prepared bytes and scratch they need.

    Steps are nearly linear in the micro-batch size.
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
    """Options of problems of very different sizes. More workspace mostly helps, and helps less and less."""
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
    """Budgets in bytes, from tight to ample."""
    workspaces = [[c.workspace_bytes for c in configurations] for configurations in options.values()]
    least, most = sum(map(min, workspaces)), sum(map(max, workspaces))
    return [least + int(share * (most - least)) for share in BUDGETS]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _front(batch_size: int) -> str:
    return f"front of every batch size, N={batch_size}, all sizes, {ALGORITHMS} algorithms"


def _division(problems: int, configurations: int) -> str:
    return f"WD, {problems} problems x {configurations} options"


_WANTED: Mapping[str, tuple[Callable[[], list[float]], float]] = {  # what is timed: how, and its bar in seconds
    **{_front(n): (partial(time_front, n), bar_s) for n, bar_s in ((256, 0.1), (1024, 1.0))},
    **{
        _division(*size): (partial(time_division, *size), bar_s) for size, bar_s in (((159, 20), 0.3), ((480, 40), 3.0))
    },
}
