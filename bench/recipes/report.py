"""Tells how a recipe came out: what was measured, each criterion, and what others have published."""

from __future__ import annotations

from math import nan

import pandas
from rich.table import Table

from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.recipes.criteria import size_in_words
from mucudnn.bench.recipes.judging import groups, speedup
from mucudnn.bench.recipes.running import Outcome
from mucudnn.bench.report.tables import milliseconds, new_table, ratio


def results_table(outcome: Outcome) -> Table:
    """Return a row for each contestant, policy and limit of each folder; times of all its problems together."""
    printed = new_table(
        outcome.recipe.title,
        ("folder", "contestant", "policy", "workspace limit"),
        ("measured", "ms", "speedup over PyTorch", "largest workspace", "largest error"),
    )
    rows = outcome.rows
    torchs = rows[rows["contestant"] == TORCH]
    for group in groups(rows):
        timed = group.rows[group.rows["time_s"].notna()]
        over_torch = nan if group.contestant == TORCH else speedup(group.rows, torchs).value
        error = group.rows["relative_error"].max()
        printed.add_row(
            *(group.folder, group.contestant, group.policy or ""),
            _size(group.limit_bytes, "" if group.policy is None else "none"),
            f"{len(timed)} of {len(group.rows)}",
            "" if timed.empty else milliseconds(float((timed["time_s"] * timed["count"]).sum())),
            "" if pandas.isna(over_torch) else ratio(over_torch),
            _size(group.rows["workspace_bytes"].max(), ""),
            "" if pandas.isna(error) else f"{error:.1e}",
        )
    return printed


def criteria_table(outcome: Outcome) -> Table:
    """Return a row for each criterion: whether it passed, and the worst that was found."""
    printed = new_table("", ("", "criterion", "found"), ())
    for one in outcome.judgements:
        printed.add_row("pass" if one.passed else "FAIL", str(one.criterion), str(one))
    return printed


def published_in_words(outcome: Outcome) -> str:
    """Say what others have published of the same; empty: nothing is known."""
    return "\n".join(f"published elsewhere: {one}" for one in outcome.recipe.published)


def _size(value: float, missing: str) -> str:
    return missing if pandas.isna(value) else size_in_words(value)
