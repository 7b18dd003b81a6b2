"""Times of DeepBench's convolutions that others published for their machines, as they stand in its repository."""

from __future__ import annotations

from pathlib import Path

import pandas

SOURCE = "DeepBench's repository, https://github.com/baidu-research/DeepBench"
GEOMETRY = ("n", "c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w")
_FILE = Path(__file__).parent / "data" / "deepbench_reference.csv"
_OPERATIONS = ("forward", "backward_data", "backward_filter")


def published_times() -> pandas.DataFrame:
    """Return a row for each geometry, operation and machine that has a time.

    Columns: those of ``GEOMETRY``, n being the mini-batch; ``operation``; ``machine``, such as ``V100 float16``;
    ``time_s``, in seconds; where a machine has two times for the same, the shorter one.
    """
    table = pandas.read_csv(_FILE)
    table["machine"] = table["device"] + " " + table["dtype"]
    times = table.rename(columns={f"{name}_ms": name for name in _OPERATIONS}).melt(
        id_vars=[*GEOMETRY, "machine"], value_vars=list(_OPERATIONS), var_name="operation", value_name="time_ms"
    )
    times["time_s"] = times.pop("time_ms") / 1e3
    return (
        times.dropna(subset=["time_s"]).groupby([*GEOMETRY, "operation", "machine"], as_index=False, sort=False).min()
    )
