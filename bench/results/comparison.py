"""Compares two result folders of a benchmark row by row: each row is faster, slower, the same or undecided.

Samples are logarithms of time over torch's time in the same round. Slow phases of shared cores last for seconds or
minutes and differ between runs, but they affect whole rounds, so that they cancel in the ratio.

- **Significance** is decided by a rank test. The p-values of all rows are compared with ``FAMILY_LEVEL`` by Holm's
  method, which corrects for multiple comparisons, also of dependent rows, such as rows with the same torch samples.
- **Size** is the ratio of the medians with its 95 % interval, by the percentile bootstrap. At the level that many
  comparisons need, a bootstrap is unreliable for few samples; therefore it decides only about "same".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, inf, log
from statistics import median_high

import numpy as np
from numpy.typing import NDArray

from mucudnn.bench.results.columns import Columns, table_of
from mucudnn.bench.results.reading import Key, Line, ResultFolder, row_key, subject_key
from mucudnn.bench.results.statistics import LEAST_ROUNDS, Estimate, interval, rank_test, rejected, resampled_medians
from mucudnn.bench.results.variants import TORCH
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.tables import Table, listed
from mucudnn.core.values import format_bytes, format_seconds

FAMILY_LEVEL = 0.001  # probability that any row of a comparison is called faster or slower by mistake
# Slowdown in slow phases of shared cores. Without torch's samples, a whole run may have been in such a phase.
PHASE = 4 / 3
_RESAMPLES = 2000

Samples = NDArray[np.float64]


class Verdict(StrEnum):
    """Outcome of a comparison of two sets of samples.

    ``SLOWER``, ``FASTER``: significantly different, and by more than the tolerance. ``SAME``: the interval of the ratio
    is within the tolerance. ``UNDECIDED``: neither.
    """

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Pair:
    """Logarithms of a row's samples before and after a change.

    is_controlled: whether the samples are divided by torch's samples of the same rounds, so that a slow machine cancels
    out.
    """

    before: Samples
    after: Samples
    is_controlled: bool


def judged(pairs: Sequence[Pair], tolerance: float) -> list[tuple[Estimate, Verdict]]:
    """Judge all pairs together; return for each pair the ratio of time after to time before, and the verdict.

    tolerance: relative change up to which times count as equal.

    Raises ``UnavailableError`` if scipy is not installed.
    """
    are_different = rejected([rank_test(pair.before, pair.after) for pair in pairs], FAMILY_LEVEL)
    limit, verdicts = log(1 + tolerance), []
    for pair, is_different in zip(pairs, are_different, strict=True):
        allowance = 0.0 if pair.is_controlled else log(PHASE)
        shift, low, high = float(np.median(pair.after) - np.median(pair.before)), -inf, inf
        if min(len(pair.before), len(pair.after)) >= LEAST_ROUNDS:
            before, after = tuple(pair.before), tuple(pair.after)
            low, high = interval(resampled_medians(after, 1, _RESAMPLES) - resampled_medians(before, 0, _RESAMPLES))
        if is_different and abs(shift) > limit + allowance:
            verdict = Verdict.SLOWER if shift > 0 else Verdict.FASTER
        elif pair.is_controlled and -limit <= low <= high <= limit:
            verdict = Verdict.SAME
        else:
            verdict = Verdict.UNDECIDED
        verdicts.append((Estimate(exp(shift), exp(low - allowance), exp(high + allowance)), verdict))
    return verdicts


# Fields of the environment that torch's time depends on. If all are equal, times are compared relative to torch's.
_OF_TORCH = ("device", "capability", "threads", "torch", "library", "numerics")
_MOST_LISTED = 10


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A row (the times of one contestant on one subject) that both compared folders have.

    before: the row in the first folder.
    after: that in the second.
    is_controlled: whether both folders also timed torch in the same rounds as this row.
    ratio: time in the second folder over time in the first.
    """

    before: Line
    after: Line
    is_controlled: bool
    ratio: Estimate
    verdict: Verdict


@dataclass(frozen=True, slots=True, eq=False)
class FolderComparison:
    """The comparison of two result folders.

    rows: in the order of the first folder.
    only_before: rows of the first folder that the second one lacks or has without samples.
    only_after: the reverse.
    tolerance: relative change up to which times count as equal.
    """

    before: ResultFolder
    after: ResultFolder
    rows: tuple[ComparedRow, ...]
    only_before: tuple[Line, ...]
    only_after: tuple[Line, ...]
    tolerance: float

    def of(self, verdict: Verdict) -> list[ComparedRow]:
        return [row for row in self.rows if row.verdict is verdict]


def compare_folders(before: ResultFolder, after: ResultFolder, tolerance: float) -> FolderComparison:
    """Compare two result folders row by row. Torch's own are compared only if its version or the machine changed.

    tolerance: relative change up to which times count as equal.

    Raises ``InvalidInputError`` for folders of different benchmarks, and ``UnavailableError`` if scipy is missing.
    """
    if before.header.subject_columns != after.header.subject_columns:
        raise InvalidInputError(
            f"{before.path} is of bench {before.header.benchmark}, {after.path} of bench {after.header.benchmark}: "
            "they have no rows in common; name two folders of the same benchmark"
        )
    torch_controls = is_torch_the_same(before, after)
    timed_before = _timed(before, torch_controls=torch_controls)
    timed_after = _timed(after, torch_controls=torch_controls)
    common = [key for key in timed_before if key in timed_after]
    pairs = []
    for key in common:
        (_, before_s, before_over), (_, after_s, after_over) = timed_before[key], timed_after[key]
        if before_over is None or after_over is None:
            pairs.append(Pair(before_s, after_s, is_controlled=False))
        else:
            pairs.append(Pair(before_over, after_over, is_controlled=True))
    rows = tuple(
        ComparedRow(timed_before[key][0], timed_after[key][0], pair.is_controlled, ratio, verdict)
        for key, pair, (ratio, verdict) in zip(common, pairs, judged(pairs, tolerance), strict=True)
    )
    return FolderComparison(
        before,
        after,
        rows,
        only_before=tuple(line for key, (line, _, _) in timed_before.items() if key not in timed_after),
        only_after=tuple(line for key, (line, _, _) in timed_after.items() if key not in timed_before),
        tolerance=tolerance,
    )


def is_torch_the_same(before: ResultFolder, after: ResultFolder) -> bool:
    """Return whether both folders have the same torch and machine, so that times can be compared over torch's."""
    first, second = before.header.environment, after.header.environment
    return all(getattr(first, name) == getattr(second, name) for name in _OF_TORCH)


def _timed(folder: ResultFolder, *, torch_controls: bool) -> dict[Key, tuple[Line, Samples, Samples | None]]:
    """Return the rows of a folder that have samples, by key, with the logarithms of their samples.

    The last value is these over torch's samples of the same rounds, or None if torch was not timed then.

    torch_controls: whether rows are compared relative to torch's rows, which are then left out of the result.
    """
    lines = [line for line in folder.lines if line["samples_s"]]
    torchs: dict[Key, Line] = {}
    if torch_controls:
        torchs = {subject_key(line, folder.header): line for line in lines if line["contestant"] == TORCH}
        lines = [line for line in lines if line["contestant"] != TORCH]
    timed = {}
    for line in lines:
        torch = torchs.get(subject_key(line, folder.header))
        samples, over_torch = np.log(line["samples_s"]), None
        if torch and torch["turns"] == line["turns"] and len(torch["samples_s"]) == len(samples):
            over_torch = samples - np.log(torch["samples_s"])
        timed[row_key(line, folder.header)] = line, samples, over_torch
    return timed


_RIGHT: Columns[ComparedRow] = {
    "before": lambda row: _configuration(row.before),
    "after": lambda row: _configuration(row.after),
    "ratio": lambda row: f"{row.ratio.value:.3f}",
    "95 % interval": lambda row: f"{row.ratio.low:.3f} to {row.ratio.high:.3f}",
}


def comparison_table(comparison: FolderComparison, *, all_rows: bool = False) -> Table:
    """Return a table of rows that became slower or faster, slowest first.

    all_rows: include the rows that stayed the same or are undecided.
    """
    shown = [Verdict.SLOWER, Verdict.FASTER, *((Verdict.UNDECIDED, Verdict.SAME) if all_rows else ())]
    rows = [row for row in comparison.rows if row.verdict in shown]
    left: Columns[ComparedRow] = {
        "subject": lambda row: _subject(comparison.before, row.before),
        "contestant": lambda row: _contestant(row.before),
        "verdict": lambda row: row.verdict.value,
    }
    rows.sort(key=lambda row: (shown.index(row.verdict), -row.ratio.value))
    return table_of(rows, f"{comparison.after.path} against {comparison.before.path}", left, _RIGHT)


def in_words(comparison: FolderComparison) -> str:
    """Describe a comparison: counts, method, differences of the settings, and rows that only one folder has."""
    before, after, rows = comparison.before, comparison.after, comparison.rows
    counts = ", ".join(f"{len(comparison.of(verdict))} {verdict}" for verdict in Verdict)
    over_torch = ", each over PyTorch's time in the same round" if is_torch_the_same(before, after) else ""
    lines = [
        f"{len(rows)} rows are in both: {counts}; changes up to {comparison.tolerance:.0%} are ignored",
        f"ratio: time after / time before{over_torch}; significance level {FAMILY_LEVEL:g} for all rows together",
    ]
    if uncontrolled := sum(not row.is_controlled for row in rows):
        lines.append(
            f"{uncontrolled} rows lack samples of the same PyTorch in both folders: slow phases of the machine do not "
            f"cancel, so these rows count as slower or faster only beyond a ratio of {PHASE:.2f}"
        )
    if differences := before.header.differences(after.header):
        lines.append(f"between the folders: {'; '.join(differences)}")
    for folder, only in ((before, comparison.only_before), (after, comparison.only_after)):
        if only:
            names = [f"{_subject(folder, line)} {_contestant(line)}" for line in only]
            lines.append(f"only in {folder.path}: {len(only)} rows: {listed(names, _MOST_LISTED, '; ')}")
        lines += folder.problems
    return "\n".join(lines)


def _subject(folder: ResultFolder, line: Line) -> str:
    """Return the name of a row's subject, from its text columns only, because sizes would fill the table."""
    return " ".join(line[name] for name in folder.header.subject_columns if isinstance(line[name], str))


def _contestant(line: Line) -> str:
    """Return the name of a row's contestant (the implementation that was timed): ``mucudnn power-of-two 64 MiB``."""
    limit = None if line["limit_bytes"] is None else format_bytes(line["limit_bytes"])
    return " ".join(part for part in (line["contestant"], line["policy"], limit) if part)


def _configuration(line: Line) -> str:
    middle = format_seconds(median_high(line["samples_s"]))
    return f"{middle} {line['configuration']}" if line["configuration"] else middle
