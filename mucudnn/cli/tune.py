"""``mucudnn tune``: measure the convolutions of a source, choose a configuration for each, and print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.bench.sources.networks import NETWORKS
from mucudnn.bench.sources.published import TABLES
from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.cli.shared.parameters import OutputFile
from mucudnn.cli.shared.ranks import of_torchrun, on_every_rank
from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.files import whole_file, whole_text

if TYPE_CHECKING:
    from mucudnn.bench.sources.layers import LayerTable
    from mucudnn.bench.sources.table_tuning import TableTuning
    from mucudnn.optimizing.keeping import Keeping
    from mucudnn.tuning.headroom import Limits

_POINTS = 8  # of the curve of a training step
_TIMEOUT_S = 1800.0  # timeout of a rank that waits for another one: torch's default for gloo

_HELP = f"""Measure the convolutions of SOURCE and choose micro-batches and algorithms for each.

SOURCE is a network ({", ".join(NETWORKS)}), a built-in table ({", ".join(TABLES)}), a CSV file of layers, or
package.module:factory or file.py:factory, a function that returns your own PyTorch model (with --input 3x224x224).
Stored measurements are reused. Only candidates that fit the limit or budget are measured: tune with the largest that
you will ask for.

With --stored, nothing is measured: the choice is from the stored measurements of one environment (machine, threads,
versions), and is that of a tuning with the same options; a configuration that was never run whole has its predicted
time.

With --memory-budget, what a training step of --batch samples takes within the budget is shown, too, and the largest
batch that fits.

Under torchrun (torchrun --nproc-per-node 4 -m mucudnn tune SOURCE), the measuring is divided among the ranks.
"""


@click.command(cls=FileCommand, help=_HELP)
@options.source
@options.dtype
@options.memory_format
@options.config(
    options.limit_or_headroom,
    "workspace_budget",
    options.setting("memory_budget", remark=" Here: of a training step."),
    *options.MEASURING,
    "share_tuning",
)
@options.known_threads
@options.known_device
@options.flag("stored", "Choose from --database, a database or an export of one, without measuring.")
@options.environment
@options.flag("curve", "Also show the least time with more or less of each budget, or limit.")
@options.option("picture", OutputFile(".svg"), "Also draw the curves into this file.", variable="picture_file")
@click.option(
    "--write-lp",
    "program_file",
    metavar="FILE",
    type=OutputFile(".lp", ".mps"),
    help="Also write the integer program of the budget to this file, for CBC, HiGHS, GLPK and other solvers.",
)
@outputs("json")
def tune(
    *,
    source: str,
    threads: int | None,
    device: str,
    stored: bool,
    environment: str | None,
    curve: bool,
    picture_file: Path | None,
    program_file: Path | None,
    outputs: Outputs,
    config: Config,
    **sizes: Any,
) -> None:
    from mucudnn.bench.results.tuning_report import (
        account_in_words,
        batch_in_words,
        curve_table,
        step_table,
        steps_record,
        time_by_size,
        tuning_record,
    )
    from mucudnn.bench.results.tuning_report import tuning_table as table_of

    if program_file is not None and config.workspace_budget is None:
        raise click.UsageError("--write-lp writes the program of a budget: give --workspace-budget, too")
    if environment is not None and not stored:
        raise click.UsageError("--environment picks from stored measurements: give --stored, too")
    if curve and config.has_headroom_limit:
        raise click.UsageError("--curve is of one budget or limit, and the headroom is one for each module")
    if picture_file is not None and not curve:
        raise click.UsageError("--picture draws curves: give --curve, too")
    if config.memory_budget is not None and (stored or of_torchrun("WORLD_SIZE") not in (None, 1)):
        raise click.UsageError("--memory-budget runs training steps in one process: leave out --stored and torchrun")
    budget_bytes = config.memory_budget_bytes
    steps = None if budget_bytes is None else steps_now(source, sizes, config, threads, device, with_curve=curve)
    if stored:
        table, limits = load_limited(source, sizes, config, device)
        tuning: TableTuning | None = solve_stored(table, config, environment, limits)
    else:
        tuning = tune_now(source, sizes, config, threads, device)
    if tuning is None:
        return
    if program_file is not None and tuning.division is not None:
        with whole_text(program_file) as stream:
            stream.write(tuning.division.program(program_file.suffix.lower()))
    points = time_by_size(tuning) if curve and not tuning.interrupted else ()
    outputs.tell(
        table_of(tuning),
        "" if tuning.interrupted else account_in_words(tuning),
        *([curve_table(tuning, points)] if points else ()),
        *(() if steps is None else (step_table(source, steps[0]), batch_in_words(*steps[1]))),
        str(tuning.environment),
        record={**tuning_record(tuning, points), "steps": None if steps is None else steps_record(*steps)},
    )
    if picture_file is not None:
        from mucudnn.bench.results.pages.pictures import curves

        drawn = {"convolutions, by workspace": [(point.size_bytes, point.time_s) for point in points]}
        if steps is not None:
            drawn["training step"] = [(keeping.budget_bytes, keeping.predicted_s) for keeping in steps[0]]
        with whole_file(picture_file) as stream:
            stream.write(curves(drawn))
    if tuning.interrupted:
        raise KeyboardInterrupt(f"{len(tuning.rows)} of {tuning.wanted} are ready")


def load_limited(
    source: str, sizes: Mapping[str, Any], config: Config, device: str
) -> tuple[LayerTable, Limits | None]:
    """Load the layers of a source, and the limit of each module if the workspace limit is the headroom, else None.

    Headroom is the memory that is free in a training step; the table then has a layer per module.

    sizes: further arguments of ``load_source``.
    device: where the training step runs.
    """
    if not config.has_headroom_limit:
        from mucudnn.bench.sources.layers import load_source

        return load_source(source, **sizes), None
    from mucudnn.bench.sources.table_tuning import table_with_headroom

    return table_with_headroom(source, **sizes, device=device)


def tune_now(
    source: str, sizes: Mapping[str, Any], config: Config, threads: int | None, device: str
) -> TableTuning | None:
    """Tune a layer table on a device, under torchrun on all ranks together. Return None on ranks other than 0.

    sizes: further arguments of ``load_source``.
    threads: number of threads; None for torch's default.
    device: ``cuda`` is the GPU of the local rank.

    After Ctrl-C the result has the rows that are ready.
    """

    def tuned() -> TableTuning:
        import torch

        from mucudnn.bench.sources.table_tuning import tune_table
        from mucudnn.core.terminal import progress_bar
        from mucudnn.running.devices import current_environment, device_named, made_current

        options.use_threads(threads)
        local_rank = of_torchrun("LOCAL_RANK")
        gpus = 0 if local_rank is None or device != "cuda" else torch.cuda.device_count()
        place = device_named(f"cuda:{(local_rank or 0) % gpus}" if gpus > 1 else device)
        with made_current(place):
            current_environment(place.type)  # fails early if the device is missing
            table, limits = load_limited(source, sizes, config, place.type)
            with progress_bar() as progress:
                return tune_table(table, config, limits=limits, device=place.type, progress=progress)

    ranks = of_torchrun("WORLD_SIZE") or 1
    if ranks == 1:
        return tuned()
    return on_every_rank(tuned, ranks, "cpu", timeout_s=_TIMEOUT_S)  # gloo suffices, since they exchange only text


def steps_now(
    source: str, sizes: Mapping[str, Any], config: Config, threads: int | None, device: str, *, with_curve: bool
) -> tuple[tuple[Keeping, ...], tuple[int, Keeping]]:
    """Return the curve of a model's training steps, and the largest batch within the budget: see ``largest_batch``.

    sizes: further arguments of ``seeded_model``; the batch size is 1 if it is None.
    with_curve: whether the curve has budgets between the least, the config's and that with which all is kept.
    """
    from mucudnn.bench.sources.models import blamed_in_training, importable, seeded_model
    from mucudnn.core.terminal import progress_bar
    from mucudnn.optimizing.curve import largest_batch, step_curve
    from mucudnn.running.devices import device_named, made_current

    options.use_threads(threads)
    sizes, config = {**sizes, "batch": sizes["batch"] or 1}, replace(config, confirm=False)
    with made_current(device_named(device)), importable(source), progress_bar() as progress:
        model, x = seeded_model(source, device=device, **sizes)
        with blamed_in_training(source, x.shape):
            curve = step_curve(model.train(), x, config, points=_POINTS if with_curve else 2, progress=progress)
            return curve, largest_batch(model, x, config, progress=progress)


def solve_stored(
    table: LayerTable, config: Config, environment: str | None, limits: Limits | None = None
) -> TableTuning:
    """Choose configurations for a table from the measurements in the config's database, without measuring.

    environment: number of the environment to use, or part of its description; None for the only one.
    """
    from mucudnn.bench.sources.table_tuning import of_table, table_tasks
    from mucudnn.store.database import default_path
    from mucudnn.store.exports import open_stored
    from mucudnn.tuning.replay import replay, select_measurements

    with open_stored(config.database or default_path()) as database:
        tasks = table_tasks(table, config, limits)
        measurements = select_measurements(
            database,
            tasks,
            BatchSizePolicy(config.policy),
            algorithms=config.algorithms,
            strict=config.strict,
            environment=environment,
        )
        return of_table(table, replay(tasks, config, measurements))
