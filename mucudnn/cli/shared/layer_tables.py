"""Layer tables for commands: loading one, tuning it with a progress bar, or solving it from stored measurements."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

from mucudnn.words.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from mucudnn.bench.sources.layers import Layer, LayerTable
    from mucudnn.bench.sources.table_tuning import TableTuning
    from mucudnn.running.environment import Environment
    from mucudnn.tracing.headroom import Limits
    from mucudnn.words.config import Config


def load_limited(
    source: str, sizes: dict[str, Any], config: Config, device: str = "cpu"
) -> tuple[LayerTable, Limits | None]:
    """Load the table of a source; if the config asks for the headroom, module by module and with that of each.

    sizes: as for ``load_source``. device: where the training step is, whose headroom it is.
    """
    if not config.has_headroom_limit:
        from mucudnn.bench.sources.layers import load_source

        return load_source(source, **sizes), None
    from mucudnn.bench.sources.table_tuning import table_with_headroom

    table, headroom = table_with_headroom(source, **sizes, device=device)
    return table, headroom.limits


def tuning_environment(device: str, config: Config) -> Environment:
    """Return the environment in which a device is tuned: PyTorch's settings, and what the config asks beyond them.

    Raises ``UnavailableError`` for a device that is not there.
    """
    from mucudnn.running.environment import current_environment
    from mucudnn.words.torch_settings import deterministic_torch

    with deterministic_torch(config.deterministic):
        return current_environment(device)


def tune_with_progress(table: LayerTable, config: Config, device: str, limits: Limits | None = None) -> TableTuning:
    """Tune all of the table, or the rows that are ready when Ctrl-C comes. Arguments as for ``tune_table``."""
    from mucudnn.bench.sources.table_tuning import tune_table
    from mucudnn.words.progress import progress_bar

    with progress_bar() as progress:
        return tune_table(table, config, limits=limits, device=device, progress=progress)


def require_complete(tuning: TableTuning) -> None:
    """Raises ``KeyboardInterrupt`` with what is ready, if the tuning was interrupted."""
    if tuning.interrupted:
        raise KeyboardInterrupt(f"{len(tuning.rows)} of {tuning.wanted} are ready")


def solve_stored(
    path: Path, table: LayerTable, config: Config, environment: str | None, limits: Limits | None = None
) -> tuple[TableTuning, tuple[str, ...]]:
    """Solve the table from a database or profile. Returns, and prints, notes: what was set aside, and is not known.

    environment: as for ``select_measurements``.
    """
    from mucudnn.bench.sources.table_tuning import of_table, table_tasks
    from mucudnn.database.exports import open_stored
    from mucudnn.database.selection import select_measurements
    from mucudnn.tuning.replay import replay, shortcomings
    from mucudnn.words.config import BatchSizePolicy

    with open_stored(path) as database:
        tasks = table_tasks(table, config, limits)
        found = select_measurements(
            database,
            tasks,
            BatchSizePolicy(config.policy),
            algorithms=config.algorithms,
            strict=config.strict,
            environment=environment,
        )
        notes = (*found.notes, *shortcomings(tasks, found))
        for note in notes:
            click.echo(f"Note: {note}", err=True)
        return of_table(table, replay(tasks, config, found)), notes


def named_layer(table: LayerTable, name: str | None) -> Layer:
    """Return the layer that goes by this name, alone or with equal ones; ``None``: the only one there is.

    Raises ``InvalidInputError``.
    """
    by_name = {name: layer for layer in table.layers for name in (layer.name, *layer.names)}
    if name in by_name:
        return by_name[name]
    if name is None and len(table.layers) == 1:
        return table.layers[0]
    close = get_close_matches(name or "", by_name, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    asked = "no layer is named" if name is None else f"{table.source} has no layer {name!r}"
    names = ", ".join(layer.names[0] for layer in table.layers)
    raise InvalidInputError(f"{asked}; {hint}give --layer NAME, one of {names}")
