"""Options that pick layers and workspace limits, and the functions that read their values."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

import click

from mucudnn.cli.shared import options
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import Pair
from mucudnn.words.units import parse_bytes

if TYPE_CHECKING:
    from mucudnn.bench.sources.layers import Layer, LayerTable

_ALL = "all"


def parse_limits(text: str) -> tuple[int, ...]:
    """``8MiB,64MiB`` -> bytes. Raises ``InvalidInputError``."""
    sizes = [parse_bytes(part.strip()) for part in text.split(",")]
    limits = tuple(size for size in sizes if size is not None)
    if len(limits) < len(sizes):
        raise InvalidInputError("no limit at all is compared in any case; give sizes only, as 8MiB,64MiB")
    return limits


def parse_limits_or_none(text: str) -> tuple[int | None, ...]:
    """Read workspace limits, each once; none is no limit. Raises ``InvalidInputError``.

    >>> parse_limits_or_none("8MiB, none")
    (8388608, None)
    """
    return tuple(dict.fromkeys(parse_bytes(part.strip()) for part in text.split(",")))


def parse_filters(text: str) -> tuple[Pair, ...]:
    """``3x3,5x5`` -> ((3, 3), (5, 5)); all -> (). Raises ``InvalidInputError``."""
    if text == _ALL:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if re.fullmatch(f"{options.SIZE}x{options.SIZE}", part) is None]:
        raise InvalidInputError(f"{wrong[0]!r} is not height x width of a filter; write for example 3x3,5x5, or {_ALL}")
    sizes = [tuple(map(int, part.split("x"))) for part in parts]
    return tuple((r, s) for r, s in sizes)


def filters_of(option: str, default: str) -> options.Decorator:
    """Add an option that keeps only layers with filters of some sizes."""
    return click.option(
        option,
        "filters",
        type=options.Text("RxS,...", parse_filters),
        default=default,
        show_default=True,
        help="Only the layers with a filter of these sizes, or all.",
    )


layer_of_source = click.option(
    "--layer", "layer_name", metavar="NAME", help="Of SOURCE's layers; mucudnn layers SOURCE lists them."
)


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
