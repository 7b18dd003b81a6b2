"""Tables and summaries of a result folder of convolutions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas
from rich.table import Table

from mucudnn.bench.results.pages.measured import measured, summary_rows
from mucudnn.bench.results.pages.reports import printed_table
from mucudnn.bench.results.pages.tables import summary_table
from mucudnn.bench.results.reading import ResultFolder
from mucudnn.bench.results.text_tables import milliseconds, new_table, ratio, some
from mucudnn.bench.results.variants import TORCH, shown_name
from mucudnn.bench.suites.convolutions.contest import UNDIVIDED
from mucudnn.core.records import BUSY

_KIND = ["dtype", "memory_format"]
_CONTESTANT = ["contestant", "policy", "limit_bytes"]


def convolutions_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table of the layers if mucudnn chose under one policy and limit, a summary, and texts.

    The last text compares PyTorch with mucudnn, each in the better memory format.
    """
    rows = measured(folder)
    ours = _ours(rows)
    if len(ours[_CONTESTANT].drop_duplicates()) == 1:
        yield _layers_table(folder, rows)
    yield printed_table(summary_table(summary_rows(rows)))
    yield left_out_in_words(folder)
    for name, failed in rows[rows["failure"].notna()].groupby("contestant", sort=False):
        yield f"{shown_name(str(name))}: no time in {len(failed)} rows, as {failed['failure'].iloc[0]}"
    timed = ours.dropna(subset=["time_s"])
    if len(timed):
        errors = (timed["predicted_s"].astype(float) / timed["time_s"] - 1).abs()
        yield f"predicted against measured time: median error {errors.median():.1%}"
    dtypes = list(rows["dtype"].unique())
    for dtype in dtypes:
        told = _in_words(rows[rows["dtype"] == dtype])
        yield f"{dtype}: {told}" if told and len(dtypes) > 1 else told


def _ours(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return the rows of mucudnn's choices, without those of undivided algorithms."""
    return rows[rows["policy"].notna() & (rows["contestant"] != UNDIVIDED)]


def _layers_table(folder: ResultFolder, rows: pandas.DataFrame) -> Table:
    """Return a table of the times of each layer and operation, with columns for each dtype and memory format."""
    kinds = [*rows[_KIND].drop_duplicates().itertuples(index=False, name=None)]
    names = list(rows["contestant"].unique())
    columns = ["count"]
    for dtype, memory_format in kinds:
        of = memory_format if rows["dtype"].nunique() == 1 else f"{dtype} {memory_format}"
        columns += [*(f"{shown_name(name)} ms {of}" for name in names), "speedup"]
    title = f"{folder.header.source}, batch {', '.join(map(str, folder.header.settings['batch_sizes']))}"
    printed = new_table(title, ("layer", "operation", "faster configuration"), columns)
    keys = ["turns", *_KIND, "contestant"]
    found = dict(zip(rows[keys].itertuples(index=False, name=None), rows.to_dict("records"), strict=True))
    for turns in rows["turns"].unique():
        every = [[found[turns, *kind, name] for name in names] for kind in kinds]
        faster = min((each[-1] for each in every), key=lambda row: np.nan_to_num(row["time_s"], nan=np.inf))
        left = [_known(faster[key], str) for key in ("layer", "operation", "configuration")]
        printed.add_row(*left, f"{faster['count']:.0f}", *(cell for each in every for cell in _cells(each)))
    printed.caption = "same: the best undivided configuration is mucudnn's, and was timed once"
    return printed


def _cells(rows: Sequence[Mapping[Hashable, Any]]) -> Iterator[str]:
    """Yield the times of a problem's contestants, mucudnn last, and its speedup."""
    ours = rows[-1]
    for row in rows:
        is_same = row["contestant"] == ours["same_as"]
        yield "same" if is_same else _known(row["time_s"], milliseconds)
    yield _known(ours["speedup"], ratio)


def _known(value: Any, written: Callable[[Any], str]) -> str:
    return "" if pandas.isna(value) else written(value)


def _in_words(rows: pandas.DataFrame) -> str:
    """Compare the totals of PyTorch and mucudnn, each in its better memory format and under its best limit.

    Limits under which more problems have no choice than under others do not count, nor problems without a time of each;
    the text is empty if there are none.
    """
    choice, ours = ["memory_format", *_CONTESTANT], _ours(rows)
    timed = ours.groupby(choice, dropna=False)["time_s"].transform("count")
    torchs = rows[rows["contestant"] == TORCH]
    torchs = torchs.assign(time_s=torchs["time_s"].fillna(torchs["least_s"].astype(float)))
    rows = pandas.concat([torchs, ours[timed == timed.max()]])
    rows = rows[rows["time_s"].notna().groupby(rows["turns"]).transform("all")]
    rows = rows.assign(s=rows["count"] * rows["time_s"])
    total_s = rows.groupby(choice, dropna=False)["s"].sum().reset_index()
    is_torch = total_s["contestant"] == TORCH
    if is_torch.all() or not is_torch.any():
        return ""
    more = "" if rows["samples_s"].map(len).all() else "more than "
    busy = rows[rows["load"] > BUSY]["turns"].nunique()
    doubt = f" ({busy} problems were measured while others took more than {BUSY:.0%} of the machine)" if busy else ""
    speedup = total_s[is_torch]["s"].min() / total_s[~is_torch]["s"].min()
    return f"better PyTorch / better mucudnn: {more}{ratio(speedup)}{doubt}"


def left_out_in_words(folder: ResultFolder) -> str:
    """Return a line for each reason why problems were not measured, with their number and examples.

    The text is empty if every problem was measured.
    """
    return "\n".join(
        f"left out: {len(left)} problem{'' if len(left) == 1 else 's'}, as {reason}: {some(left)}"
        for reason, left in folder.left_out_by_reason.items()
    )
