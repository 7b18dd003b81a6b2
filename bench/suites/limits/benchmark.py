"""Makes the comparison of the μ-cuDNN paper: whole against divided mini-batches under equal workspace limits.

Each problem is measured once, without a limit. These measurements also tell what each limit leaves. Then whole runs
decide. First they find the best of the likely configurations under each limit, for the rival as well as for ours. Then
the chosen ones and torch, under each of its settings, are timed in turns, in rounds of their own: these times are
reported. Last comes a search for the least workspace with which ours is as fast as torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.contests.torch_variants import torch_variants
from mucudnn.bench.sources.layers import LayerTable
from mucudnn.bench.sources.table_tuning import table_tasks
from mucudnn.bench.suites.limits.contest import Contest
from mucudnn.bench.suites.limits.result import FailedProblem, LimitsComparison
from mucudnn.database.database import Database
from mucudnn.measuring.timing.candidate_errors import CANDIDATE_ERRORS
from mucudnn.measuring.timing.timer import Runner
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning.result import allowed
from mucudnn.tuning.tuner import tune_tasks
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import first_line
from mucudnn.words.progress import Progress, share_of, silent
from mucudnn.words.results import Measurement, MicroConfig
from mucudnn.words.task import Task

ROUNDS = 7


def compare_under_limits(
    table: LayerTable,
    config: Config,
    limits: Iterable[int],
    *,
    device: str = "cpu",
    rounds: int = ROUNDS,
    seconds: float | None = None,
    progress: Progress | None = None,
    machine: Machine | None = None,
    database: Database | None = None,
    passes_over: Callable[[Task], bool] = lambda _: False,
) -> Iterator[LimitsComparison]:
    """Compare problem by problem, in the order of the table. Yields all that is known after each problem.

    config: its workspace limit does not count. limits: bytes; no limit at all is always compared, too. rounds: samples
    of each whole run. seconds: the first problem is always begun, a later one only if there is time for the longest so
    far. progress: told what is being done and the fraction that is done. machine, database: used in place of this
    machine and of the file that the config names. passes_over: says which problems are not to be measured, as an
    earlier run has them.

    A problem that cannot be run is passed over, with its reason. Raises what ``tune`` raises, also on Ctrl-C.
    """
    config = replace(config, workspace_limit=None, workspace_budget=None)
    machine, report = machine or Machine.current(device), progress or silent
    tasks = [task for task in table_tasks(table, config) if not passes_over(task)]
    start_s, longest_s = machine.clock.now(), 0.0
    with torch_variants(machine.device) as variants:
        known = _nothing_yet(table, config, machine, (*sorted({*limits}), None), variants, rounds, len(tasks))
        for index, task in enumerate(tasks):
            begun_s = machine.clock.now()
            if index and seconds is not None and begun_s - start_s + longest_s > seconds:
                break
            step = share_of(report, index / len(tasks), 1 / len(tasks))
            try:
                measurements = _measure(task, config, machine, database, step)
                step(f"{task}: whole runs", 0.8)
                compared = Contest(task, machine, measurements, variants, rounds).compare(known)
                known = replace(known, problems=(*known.problems, compared))
            except CANDIDATE_ERRORS as error:
                known = replace(known, failed=(*known.failed, FailedProblem(task, first_line(error))))
            longest_s = max(longest_s, machine.clock.now() - begun_s)
            yield known


def _nothing_yet(
    table: LayerTable,
    config: Config,
    machine: Machine,
    limits: tuple[int | None, ...],
    variants: Mapping[str, Runner],
    rounds: int,
    wanted: int,
) -> LimitsComparison:
    reference = next((name for name in variants if name != TORCH), TORCH)
    rivals = ", ".join(source.title for source in machine.sources) or "algorithms"
    return LimitsComparison(
        table.source, config, machine.environment, limits, reference, rivals, wanted=wanted, rounds=rounds
    )


def _measure(
    task: Task, config: Config, machine: Machine, database: Database | None, progress: Progress
) -> list[Measurement]:
    """Measurements of all that the config allows.

    Divided mini-batches may have beaten whole ones before these were measured. So whole ones are tuned once more, among
    themselves.
    """
    measured: dict[MicroConfig, Measurement] = {}
    for policy, start, share in ((config.policy, 0.0, 0.7), (BatchSizePolicy.UNDIVIDED, 0.7, 0.1)):
        part, asked = share_of(progress, start, share), replace(config, policy=policy, thorough=True)
        tuned = tune_tasks([task], asked, progress=part, machine=machine, database=database).problems[0]
        measured |= {m.micro_config: m for m in tuned.measurements}
    return allowed(measured.values(), tuned.error_bound)
