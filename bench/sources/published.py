"""Times of DeepBench's convolutions that others published for their machines, as they stand in its repository.

Loads pandas only when a table is read: help texts name the tables.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

SOURCE = "DeepBench's repository, https://github.com/baidu-research/DeepBench"
GEOMETRY = ("n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w")
_FILE = Path(__file__).parent / "data" / "deepbench_reference.csv"
TABLES = MappingProxyType(
    {
        "deepbench-train": "training_set",
        "deepbench-inference-server": "inference_server_set",
        "deepbench-inference-device": "inference_device_set",
    }
)
"""Sources with DeepBench's layers, and the values of the column ``set`` that each has."""
_OPERATIONS = ("forward", "backward_data", "backward_filter")


def published_times() -> pandas.DataFrame:
    """Return a row for each geometry, operation and machine that has a time.

    Columns: those of ``GEOMETRY``, n being the mini-batch; ``operation``; ``machine``, such as ``V100 float16``;
    ``time_s``, in seconds; where a machine has two times for the same, the shorter one.
    """
    import pandas

    table = pandas.read_csv(_FILE)
    table["machine"] = table["device"] + " " + table["dtype"]
    times = table.rename(columns={f"{name}_ms": name for name in _OPERATIONS}).melt(
        id_vars=[*GEOMETRY, "machine"], value_vars=list(_OPERATIONS), var_name="operation", value_name="time_ms"
    )
    times["time_s"] = times.pop("time_ms") / 1e3
    return (
        times.dropna(subset=["time_s"]).groupby([*GEOMETRY, "operation", "machine"], as_index=False, sort=False).min()
    )


DIVIDED_GEOMETRY = ("c", "h", "w", "k", "r", "s")
_DIVIDED_FILE = _FILE.with_name("ucudnn_reference.csv")


def published_gains() -> pandas.DataFrame:
    """Return what the authors of μ-cuDNN published of DeepBench: a row for each geometry.

    Columns: those of ``DIVIDED_GEOMETRY``; ``128MiB``, ``256MiB``, ``512MiB``: speedup of micro-batched over
    undivided convolutions under this workspace limit, with 256 samples on a P100-SXM2. They were read from the bars in
    https://github.com/spcl/ucudnn, to 0.01, which do not say which operations were summed. Of rows of the same geometry
    it is the mean. The geometries that are not here had 1.00 to 1.02.
    """
    import pandas

    table = pandas.read_csv(_DIVIDED_FILE).drop(columns="group")
    means = table.groupby(list(DIVIDED_GEOMETRY), as_index=False, sort=False).mean()
    return means.rename(columns=lambda name: name.removeprefix("speedup_"))
