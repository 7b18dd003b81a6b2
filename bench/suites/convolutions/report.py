"""Tables and summaries of a result folder of convolutions, for ``bench network``, ``limits`` and ``deepbench``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

import pandas
from rich.table import Table

from mucudnn.bench.contests.bounds import MachineLimits, means_by_kind
from mucudnn.bench.contests.variants import TORCH, shown_name
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import problem_of
from mucudnn.bench.folders.speedups import speedup_of
from mucudnn.bench.report.tables import milliseconds, new_table, ratio, some
from mucudnn.bench.suites.convolutions.contest import OURS, SLOWER, UNDIVIDED
from mucudnn.bench.suites.convolutions.same_time import WITHIN
from mucudnn.words.units import format_bytes

FLOOR_BYTES = 2**20  # Smaller workspaces are raised to this in ratios, which are undefined at 0 bytes.


def speedups(folder: ResultFolder) -> pandas.DataFrame:
    """Return the rows that were timed with torch, with the column ``speedup``: torch's median time over the row's."""
    timed = folder.rows[folder.rows["time_s"].notna()]
    keys = ["turns", "memory_format"]  # All memory formats of a problem are timed interleaved.
    torch_s = timed[timed["contestant"] == TORCH].set_index(keys)["time_s"].rename("torch_s")
    joined = timed[timed["contestant"] != TORCH].join(torch_s, on=keys)
    return joined.assign(speedup=joined["torch_s"] / joined["time_s"]).dropna(subset=["speedup"])


def deepbench_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table of geometric-mean speedups over PyTorch, with a row for each contestant, policy and limit.

    A text about the problems that were left out follows.
    """
    printed = new_table(
        f"{folder.header.source}: speedups over PyTorch, geometric means",
        ("contestant", "policy", "workspace limit"),
        ("problems", "forward", "backward data", "backward filter", "all"),
    )
    groups = speedups(folder).groupby(["contestant", "policy", "limit_bytes"], dropna=False, sort=False)
    for _, group in groups:
        first = group.iloc[0]
        is_ours = isinstance(first["policy"], str)
        printed.add_row(
            *(first["contestant"], *((first["policy"], _limit(first["limit_bytes"])) if is_ours else ("", ""))),
            str(len(group)),
            *(
                _mean(group["speedup"][group["operation"] == name])
                for name in ("forward", "backward_data", "backward_filter")
            ),
            _mean(group["speedup"]),
        )
    measured = folder.rows["turns"].nunique()
    printed.caption = f"{measured} of {folder.header.wanted} problems are measured"
    yield printed
    yield left_out_in_words(folder)


def left_out_in_words(folder: ResultFolder) -> str:
    """Return a line for each reason why problems were not measured, with their number and examples.

    The text is empty if every problem was measured.
    """
    return "\n".join(
        f"left out: {len(left)} problem{'' if len(left) == 1 else 's'}, as {reason}: {some(left)}"
        for reason, left in folder.left_out_by_reason.items()
    )


def _limit(limit: float) -> str:
    return format_bytes(None if pandas.isna(limit) else int(limit))


def _mean(ratios: Iterable[float]) -> str:
    """Format the geometric mean of ratios, in which a speedup of 2 and one of 1/2 cancel."""
    values = [*ratios]
    return ratio(geometric_mean(values)) if values else ""


def network_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table of times of each layer and operation in every memory format, then the problems left out.

    Totals of the table count each convolution as often as it occurs in the network.
    """
    network = _Network(folder)
    columns = ["count"]
    for memory_format in network.formats:
        columns += [f"{shown_name(name)} ms {memory_format}" for name in network.contestants]
        columns += ["speedup", *(["/ bound"] if network.limits.are_known else [])]
    title = f"{folder.header.source}, batch {', '.join(map(str, folder.header.settings['batch_sizes']))}"
    totals = ("total", "", "", "", *network.totals())
    printed = new_table(title, ("layer", "operation", "faster configuration"), columns, footer=totals)
    for cells in network.cells():
        printed.add_row(*cells)
    printed.caption = "\n".join(network.in_words())
    yield printed
    yield left_out_in_words(folder)


class _Network:
    """The content of a network's table of times, by convolution, memory format and contestant."""

    def __init__(self, folder: ResultFolder) -> None:
        rows = folder.rows[folder.rows["time_s"].notna()]
        dtype = folder.header.settings["dtype"]
        self.limits = folder.header.limits.get(dtype, MachineLimits())
        self.formats = [f for f in folder.header.settings["memory_formats"] if f in set(rows["memory_format"])]
        others = [name for name in rows["contestant"].unique() if name not in (TORCH, OURS)]
        self.contestants = (*others, TORCH, OURS)
        self.problems: dict[int, dict[tuple[str, str], dict[str, Any]]] = {}
        for row in _records(rows):
            self.problems.setdefault(row["turns"], {})[row["memory_format"], row["contestant"]] = row
        whole = len(self.formats) * len(self.contestants)
        self.problems = {turns: found for turns, found in self.problems.items() if len(found) == whole}
        self.ours = [row for found in self.problems.values() for (_, name), row in found.items() if name == OURS]
        self.faster = [self._faster(found) for found in self.problems.values()]

    def total_s(self, contestant: str, memory_format: str) -> float:
        """Return the seconds of all convolutions of the network by this contestant in this memory format."""
        rows = (found[memory_format, contestant] for found in self.problems.values())
        return float(sum(row["count"] * row["time_s"] for row in rows))

    def totals(self) -> Iterator[str]:
        """Yield the cells of the table's last line: for each memory format the total times and their ratio."""
        for memory_format in self.formats:
            times = {name: self.total_s(name, memory_format) for name in self.contestants}
            yield from map(milliseconds, times.values())
            yield ratio(times[TORCH] / times[OURS]) if times[OURS] else ""
            if self.limits.are_known:
                yield ""

    def cells(self) -> Iterator[tuple[str, ...]]:
        """Yield a line of the table for each convolution, as a tuple of cells."""
        for found, faster in zip(self.problems.values(), self.faster, strict=True):
            cells = [faster["layer"], faster["operation"], faster["configuration"], str(faster["count"])]
            for memory_format in self.formats:
                rows = [found[memory_format, name] for name in self.contestants]
                cells += [milliseconds(row["time_s"]) for row in rows]
                cells.append(ratio(rows[-2]["time_s"] / rows[-1]["time_s"]))
                if self.limits.are_known:
                    cells.append(f"{self._over_bound(rows[-1]):.2f}")
            yield tuple(cells)

    def in_words(self) -> Iterator[str]:
        """Yield the lines of text that are printed below the table."""
        if not self.problems:
            return
        torch_s, ours_s = (min(self.total_s(name, f) for f in self.formats) for name in (TORCH, OURS))
        yield (
            f"better PyTorch / better mucudnn: {ratio(torch_s / ours_s)}; predicted against measured time: "
            f"median error {_median_error(self.ours, 'time_s'):.1%}, "
            f"and {_median_error(self.ours, 'tuned_s'):.1%} right after tuning"
        )
        if self.limits.are_known:
            means = means_by_kind((problem_of(row), self._over_bound(row)) for row in self.faster)
            shown = ", ".join(f"{kind} {value:.2f}" for kind, value in means.items())
            yield (
                f"/ bound: mucudnn's time over that of the direct method at {self.limits}; "
                f"geometric mean in the faster format: {shown}"
            )
        again = [row for row in self.ours if isinstance(row.get("again_s"), list)]
        if again:
            yield _again_in_words(again)

    def _over_bound(self, row: Mapping[str, Any]) -> float:
        """Return mucudnn's time over the lower bound of direct convolution on this machine (``MachineLimits``)."""
        return float(row["time_s"] / self.limits.bound_s(problem_of(row), row["batch_size"]))

    def _faster(self, found: Mapping[tuple[str, str], Mapping[str, Any]]) -> Mapping[str, Any]:
        return min((found[f, OURS] for f in self.formats), key=lambda row: float(row["time_s"]))


def _records(rows: pandas.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]


def _median_error(rows: Sequence[Mapping[str, Any]], measured: str) -> float:
    return float(median(abs(row["predicted_s"] / row[measured] - 1) for row in rows))


def _again_in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the rows that seemed slower than PyTorch: how many were measured again, and which still were slower."""
    slower = []
    for row in rows:
        second = speedup_of([row["torch_again_s"]], [row["again_s"]])
        if second.value < SLOWER:
            what = f"{row['layer']} {row['operation']} {row['memory_format']}"
            slower.append(f"{what} {ratio(second.value)} ({ratio(second.low)} to {ratio(second.high)})")
    text = f"below {SLOWER} of PyTorch: {len(rows)}; in a second look, of twice the rounds, {len(slower)}"
    return f"{text}: {', '.join(slower)}" if slower else text


def limits_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table of mucudnn's speedups over the best undivided algorithm under each workspace limit.

    A text that compares mucudnn with torch follows.
    """
    printed = new_table(
        f"{folder.header.source}, ours against the best undivided",
        ("workspace limit",),
        (
            "undivided / ours, geometric mean",
            "least",
            "most",
            "problems",
            "nothing undivided within",
            "nothing of ours",
        ),
    )
    for limit in folder.header.settings["workspace_limit"]:
        theirs, ours = (_under(folder, name, limit) for name in (UNDIVIDED, OURS))
        gains = [theirs[turns] / ours[turns] for turns in theirs.index if theirs[turns] > 0 and ours[turns] > 0]
        ends = (ratio(min(gains)), ratio(max(gains))) if gains else ("", "")
        missing = (str(int(times.isna().sum())) for times in (theirs, ours))
        printed.add_row(format_bytes(limit), _mean(gains), *ends, str(len(gains)), *missing)
    yield printed
    yield left_out_in_words(folder)
    yield _same_time_in_words(folder)
    yield _without_limit_in_words(folder)


def _under(folder: ResultFolder, contestant: str, limit: int | None) -> pandas.Series[float]:
    """Return the seconds of a contestant under a workspace limit, by ``turns``; NaN where nothing fits the limit."""
    rows = folder.rows
    is_limit = rows["limit_bytes"].isna() if limit is None else rows["limit_bytes"] == limit
    return rows[(rows["contestant"] == contestant) & is_limit].set_index("turns")["time_s"]


def _same_time_in_words(folder: ResultFolder) -> str:
    rows = folder.rows
    sought = rows[rows["workspace_bytes"].notna() & rows["policy"].isna()]
    if sought.empty:
        return ""
    found = sought[sought["same_time_bytes"].notna()]
    pairs = [*zip(found["workspace_bytes"], found["same_time_bytes"], strict=True)]
    ratios = [max(theirs, FLOOR_BYTES) / max(ours, FLOOR_BYTES) for theirs, ours in pairs]
    return (
        f"workspace for the time of {sought.iloc[0]['contestant']} within {WITHIN:.0%}: theirs / ours {_mean(ratios)} "
        f"(geometric mean of {len(pairs)} problems; in {len(sought) - len(found)} more nothing of ours is as fast); "
        f"less than {format_bytes(FLOOR_BYTES)} counts as that: theirs in "
        f"{sum(theirs < FLOOR_BYTES for theirs, _ in pairs)}, ours in {sum(ours < FLOOR_BYTES for _, ours in pairs)}, "
        f"both in {sum(max(pair) < FLOOR_BYTES for pair in pairs)}"
    )


def _without_limit_in_words(folder: ResultFolder) -> str:
    found = speedups(folder)
    without = found[(found["contestant"] == OURS) & found["limit_bytes"].isna()]["speedup"]
    if without.empty:
        return ""
    return (
        f"without a limit, ours against PyTorch: {_mean(without)} (geometric mean), least {ratio(without.min())}, "
        f"median {ratio(without.median())}"
    )
