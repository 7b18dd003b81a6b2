"""``mucudnn explain``: the benefit of a budget, the free memory in a step, or the time of a call against its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.layer_tables import require_complete, solve_stored, tune_with_progress, tuning_environment
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand, InputFile
from mucudnn.words.config import HEADROOM, Config
from mucudnn.words.errors import InvalidInputError

if TYPE_CHECKING:
    from mucudnn.bench.sources.layers import LayerTable
    from mucudnn.bench.sources.table_tuning import TableTuning
    from mucudnn.tracing.headroom import Limits


@click.command(cls=FileCommand)
@options.source
@options.dtype
@options.memory_format
@options.option(
    "budget",
    parameters.Text("SIZE", parameters.parse_size),
    "Largest workspace of all operations together, as 256MiB.",
)
@options.flag("headroom", "In place of --budget: show the memory of a training step, and how much is free in it.")
@options.flag("memory", "In place of --budget: show the time of a call of the model, in inference, against its memory.")
@options.option(
    "from",
    InputFile(),
    "Solve from this database, or from an export of mucudnn database export, without measuring.",
    variable="stored",
)
@options.environment
@options.config(*options.MEASURING)
@options.threads
@options.device
@outputs("csv", "json", "plot", second="curve")
def explain(
    source: str,
    budget: str | None,
    headroom: bool,
    memory: bool,
    stored: Path | None,
    environment: str | None,
    device: str,
    outputs: Outputs,
    config: Config,
    **sizes: Any,
) -> None:
    """Show how the time of the network SOURCE depends on memory.

    With --budget: the share of each operation of each layer, and how much more memory its next faster configuration
    needs and how much time that saves; for the whole network, the effect of more or less memory, and the curve of time
    against budget, which --csv writes into a second file FILE-curve.csv. Only measured candidates appear: without
    --thorough the best two algorithms of each problem at all sizes, and the others at one.

    With --headroom: the memory in use in each call of a training step, and the workspace that fits below the peak.

    Missing measurements are made as by mucudnn tune.

    With --memory: the least time of a call of SOURCE's model, in inference, within any amount of memory for activations
    and workspace, where it is cut into bands of rows; measured beside PyTorch's own.
    """
    if (budget is not None) + headroom + memory != 1:
        raise _usage("give one of --budget SIZE, --headroom or --memory")
    _refuse_both(stored, environment, device, headroom=headroom, memory=memory)
    if headroom:
        config = replace(config, workspace_limit=HEADROOM)
    elif budget is not None:
        config = replace(config, workspace_budget=budget)
    if stored is None or headroom:
        tuning_environment(device, config)  # fails early if the device is missing
    tell: Callable[..., None] = _headroom if headroom else _budget
    if memory:
        tell = _memory
    tell(source, sizes, config, device, (stored, environment), outputs)


def _refuse_both(stored: Path | None, environment: str | None, device: str, *, headroom: bool, memory: bool) -> None:
    """Raise ``UsageError`` for options that are only for measuring, or only for what was measured."""
    if memory and (stored is not None or device != "cpu"):
        raise _usage("--memory runs the model, on the CPU: leave out --from and --device")
    if stored is None and environment is not None:
        raise _usage("--environment picks from the measurements of --from: give --from FILE too")
    if stored is not None:
        options.refuse_given("--from FILE is read instead of the database: give it or --database, not both", "database")
    if stored is not None and device != "cpu" and not headroom:
        raise _usage("--from FILE measures nothing, on no device: give it or --device, not both")


def _usage(message: str) -> click.UsageError:
    return click.UsageError(message, click.get_current_context())


_Stored = tuple[Path | None, str | None]  # database or profile, environment


def _budget(source: str, sizes: dict[str, Any], config: Config, device: str, stored: _Stored, outputs: Outputs) -> None:
    from mucudnn.bench.analyses import explanation as report
    from mucudnn.bench.sources.layers import load_source

    tuning = _tuned(load_source(source, **sizes), config, device, stored)
    explanation = report.explain(tuning)
    outputs.tell(
        report.explanation_table(explanation),
        report.in_words(explanation),
        str(tuning.environment),
        rows=lambda path: report.write_tables(explanation, path),
        record=report.explanation_record(explanation),
        figure=lambda: report.draw_explanation(explanation),
    )


def _memory(source: str, sizes: dict[str, Any], config: Config, device: str, stored: _Stored, outputs: Outputs) -> None:
    from mucudnn.bench.analyses import bands as report
    from mucudnn.bench.report.records import record_header
    from mucudnn.bench.sources.models import importable, seeded_model
    from mucudnn.graph.model import BandedModel
    from mucudnn.optimizing.memory_budget import fit_in_memory
    from mucudnn.running.environment import current_environment
    from mucudnn.words.progress import progress_bar

    shape = {name: sizes[name] for name in ("input_shape", "memory_format", "dtype")}
    model, arguments = seeded_model(source, sizes["batch"] or 1, **shape)
    with importable(source), progress_bar() as progress:
        made = fit_in_memory(model.eval(), [arguments], config, progress)
    if not isinstance(made, BandedModel):
        raise InvalidInputError(f"{source} cannot be cut into bands, as the warning says")
    (fitted,), environment = made.findings, current_environment(device)
    rows = report.band_rows(fitted)
    outputs.tell(
        report.bands_table(source, fitted, rows),
        report.bands_in_words(fitted, rows),
        str(environment),
        rows=rows,
        record={**record_header(config, environment), "source": source, "front": rows},
        figure=lambda: report.draw_bands(source, fitted, rows),
    )


def _headroom(
    source: str, sizes: dict[str, Any], config: Config, device: str, stored: _Stored, outputs: Outputs
) -> None:
    from mucudnn.bench.analyses import headroom as report
    from mucudnn.bench.sources.table_tuning import table_with_headroom

    table, headroom = table_with_headroom(source, **sizes, device=device)
    tuning = _tuned(table, config, device, stored, headroom.limits)
    rows = report.headroom_rows(headroom, tuning)
    outputs.tell(
        report.headroom_table(headroom, tuning, rows),
        report.in_words(headroom, rows),
        str(tuning.environment),
        rows=rows,
        record=report.headroom_record(headroom, tuning, rows),
        figure=lambda: report.draw_headroom(headroom, tuning.source, rows),
    )


def _tuned(
    table: LayerTable, config: Config, device: str, stored: _Stored, limits: Limits | None = None
) -> TableTuning:
    """Return the choices for a layer table: measured on this machine, or solved from stored measurements."""
    path, environment = stored
    if path is None:
        tuning = tune_with_progress(table, config, device, limits)
        require_complete(tuning)
        return tuning
    return solve_stored(path, table, config, environment, limits)[0]
