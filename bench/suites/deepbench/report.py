"""Tells in short what a result folder has of DeepBench: mean speedups over torch under each limit, and what is left."""

from __future__ import annotations

from math import exp, log

import pandas
from rich.table import Table

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.folders.header import SUMMARY_FILE
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.report.tables import new_table, ratio
from mucudnn.words.units import format_bytes

_MOST_SHOWN = 3


def speedups(folder: ResultFolder) -> pandas.DataFrame:
    """Return the rows that were timed beside torch, with ``speedup``: torch's median over theirs."""
    timed = folder.rows[folder.rows["time_s"].notna()]
    torch_s = timed[timed["contestant"] == TORCH].set_index("turns")["time_s"]
    others = timed[timed["contestant"] != TORCH]
    return others.assign(speedup=others["turns"].map(torch_s) / others["time_s"]).dropna(subset=["speedup"])


def deepbench_table(folder: ResultFolder) -> Table:
    """Return a row for each contestant, policy and limit, with the geometric means of its speedups over torch."""
    printed = new_table(
        f"{folder.header.source}: speedups over torch, geometric means",
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
            *(_mean(group[group["operation"] == name]) for name in ("forward", "backward_data", "backward_filter")),
            _mean(group),
        )
    measured = folder.rows["turns"].nunique() if len(folder.rows) else 0
    printed.caption = f"{measured} of {folder.header.wanted} problems are measured"
    return printed


def left_out_in_words(folder: ResultFolder) -> str:
    """Say how much was not measured, why, and some of what; a line for each reason; empty: nothing was left out."""
    by_reason: dict[str, list[str]] = {}
    for one in folder.left_out:
        by_reason.setdefault(one.reason, []).append(one.what)
    return "\n".join(_in_words(reason, left) for reason, left in by_reason.items())


def _in_words(reason: str, left: list[str]) -> str:
    more = f"; and others ({SUMMARY_FILE} has all)" if len(left) > _MOST_SHOWN else ""
    problems = "problem" if len(left) == 1 else "problems"
    return f"left out: {len(left)} {problems}, as {reason}: {'; '.join(left[:_MOST_SHOWN])}{more}"


def _limit(limit: float) -> str:
    return format_bytes(None if pandas.isna(limit) else int(limit))


def _mean(group: pandas.DataFrame) -> str:
    values = [log(value) for value in group["speedup"]]
    return ratio(exp(sum(values) / len(values))) if values else ""
