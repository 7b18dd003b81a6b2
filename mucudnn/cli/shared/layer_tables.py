"""Helpers for layer tables: load a table, and tune it with a progress bar."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from mucudnn.core.errors import InvalidInputError

if TYPE_CHECKING:
    from mucudnn.bench.sources.layers import Layer, LayerTable
    from mucudnn.bench.sources.table_tuning import TableTuning
    from mucudnn.core.config import Config
    from mucudnn.running.environment import Environment
    from mucudnn.tuning.headroom import Limits


def load_limited(
    source: str, sizes: dict[str, Any], config: Config, device: str = "cpu"
) -> tuple[LayerTable, Limits | None]:
    """Load the layers of a source, and the limit of each module if the workspace limit is the headroom, else None.

    Headroom is the memory that is free in a training step; the table then has a layer per module. sizes: further
    arguments of ``load_source``. device: where the training step runs.
    """
    if not config.has_headroom_limit:
        from mucudnn.bench.sources.layers import load_source

        return load_source(source, **sizes), None
    from mucudnn.bench.sources.table_tuning import table_with_headroom

    return table_with_headroom(source, **sizes, device=device)


def tuning_environment(device: str, config: Config) -> Environment:
    """Return the environment for measurements on a device, under the PyTorch settings that the config implies.

    Raises ``UnavailableError`` for a device that this machine does not have.
    """
    from mucudnn.core.torch_settings import deterministic_torch
    from mucudnn.running.environment import current_environment

    with deterministic_torch(config.deterministic):
        return current_environment(device)


def tune_with_progress(table: LayerTable, config: Config, device: str, limits: Limits | None = None) -> TableTuning:
    """Tune a table with a progress bar; after Ctrl-C return the rows that are ready.

    The arguments are those of ``tune_table``.
    """
    from mucudnn.bench.sources.table_tuning import tune_table
    from mucudnn.core.terminal import progress_bar

    with progress_bar() as progress:
        return tune_table(table, config, limits=limits, device=device, progress=progress)


def named_layer(table: LayerTable, name: str | None) -> Layer:
    """Return the layer that has this name; for None, the only layer of the table.

    Raises ``InvalidInputError`` if there is no such layer.
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
