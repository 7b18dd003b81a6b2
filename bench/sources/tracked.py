"""The layers whose times are tracked from version to version: few, small, and one of each kind."""

from __future__ import annotations

from pathlib import Path

from mucudnn.bench.sources.layers import LayerTable, read_csv

TRACKED = "tracked layers"  # the source in their result folders
_FILE = Path(__file__).parent / "data" / "tracked.csv"


def tracked_layers() -> LayerTable:
    """Return the layers, each with its own mini-batch.

    A layer that changes its sizes needs another name: results are compared by name and sizes.
    """
    return LayerTable(TRACKED, tuple(read_csv(_FILE)))
