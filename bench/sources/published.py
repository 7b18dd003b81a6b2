"""Published times of DeepBench's convolutions, and the speedups published with μ-cuDNN.

pandas is imported only when a table is read, because help texts import this module for the tables' names.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

SOURCE = "DeepBench's repository, https://github.com/baidu-research/DeepBench"
GEOMETRY = ("n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w")
_FILE = Path(__file__).parent / "data" / "deepbench_reference.csv"
_INFERENCE = _FILE.with_name("deepbench_inference.csv")  # also has the name of each result's file
TABLES = MappingProxyType(
    {
        "deepbench-train": "training_set",
        "deepbench-inference-server": "inference_server_set",
        "deepbench-inference-device": "inference_device_set",
    }
)
"""Names of DeepBench's layer tables, with their value in the column ``set``."""
OPERATIONS = ("forward", "backward_data", "backward_filter")


def published_times(operations: Iterable[str] = OPERATIONS) -> pandas.DataFrame:
    """Return the published times, with a row for each geometry, operation and machine.

    If only FORWARD is asked for, inference results are included, whose GPUs multiply 8-bit integers and sum in 32 bits.

    Columns: ``GEOMETRY``, where n is the mini-batch; ``operation``; ``machine``, such as ``V100 float16``; ``time_s``
    in seconds, the shorter time if two are published for a machine.
    """
    import pandas

    files = (_INFERENCE, _FILE) if {*operations} == {OPERATIONS[0]} else (_FILE,)
    table = pandas.concat(map(pandas.read_csv, files), ignore_index=True)
    table["machine"] = table["device"] + " " + table["dtype"]
    times = table.rename(columns={f"{name}_ms": name for name in OPERATIONS}).melt(
        id_vars=[*GEOMETRY, "machine"], value_vars=[*OPERATIONS], var_name="operation", value_name="time_ms"
    )
    times["time_s"] = times.pop("time_ms") / 1e3
    return (
        times.dropna(subset=["time_s"]).groupby([*GEOMETRY, "operation", "machine"], as_index=False, sort=False).min()
    )


DIVIDED_GEOMETRY = ("c", "h", "w", "k", "r", "s")
_DIVIDED_FILE = _FILE.with_name("ucudnn_reference.csv")


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
