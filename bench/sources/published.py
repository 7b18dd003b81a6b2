"""The names of DeepBench's layer tables, the speedups published with μ-cuDNN, and the figures of README.

pandas is imported only when a table is read, because help texts import this module for the tables' names.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

TABLES = MappingProxyType(
    {
        "deepbench-train": "training_set",
        "deepbench-inference-server": "inference_server_set",
        "deepbench-inference-device": "inference_device_set",
    }
)
"""Names of DeepBench's layer tables, with their value in the column ``set``."""

DIVIDED_GEOMETRY = ("c", "h", "w", "k", "r", "s")
README_FILE = Path(__file__).parent / "data" / "readme.json"
"""What README quotes of ``mucudnn bench readme``: a link to the file in docs/results."""
_DIVIDED_FILE = Path(__file__).parent / "data" / "ucudnn_reference.csv"


def published_gains() -> pandas.DataFrame:
    """Return the speedups that the authors of μ-cuDNN published for DeepBench, with a row for each geometry.

    Columns: ``DIVIDED_GEOMETRY``; ``128MiB``, ``256MiB``, ``512MiB``: speedup of micro-batched over undivided
    convolutions under this workspace limit, with 256 samples on a P100-SXM2. They were read to 0.01 from bar charts in
    https://github.com/spcl/ucudnn, which do not say which operations were summed, and averaged if a geometry occurs
    several times. Geometries not listed had 1.00 to 1.02.
    """
    import pandas

    table = pandas.read_csv(_DIVIDED_FILE).drop(columns="group")
    means = table.groupby(list(DIVIDED_GEOMETRY), as_index=False, sort=False).mean()
    return means.rename(columns=lambda name: name.removeprefix("speedup_"))
