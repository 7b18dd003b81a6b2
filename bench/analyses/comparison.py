"""Compares two result folders of a benchmark row by row, and lists rows that only one folder has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich.table import Table

from mucudnn.bench.analyses.verdicts import FAMILY_LEVEL, PHASE, Pair, Samples, Verdict, judged
from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import Key, Line, row_key, subject_key
from mucudnn.bench.folders.speedups import Estimate
from mucudnn.bench.report.tables import new_table, some
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.units import format_bytes, format_seconds

# Fields of the environment that torch's time depends on; if they are equal, times are compared relative to torch's.
_OF_TORCH = ("device", "capability", "threads", "torch", "library", "numerics")
_MOST_LISTED = 10


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A row, the times of one contestant on one subject, that both compared folders have.

    before, after: the row in each folder. is_controlled: whether both folders also timed torch in the same rounds as
    this row. ratio: time in the second folder over time in the first.
    """

    before: Line
    after: Line
    is_controlled: bool
    ratio: Estimate
    verdict: Verdict


@dataclass(frozen=True, slots=True, eq=False)
class FolderComparison:
    """Comparison of two result folders.

    rows: in the order of the first folder. only_before, only_after: rows of the first or second folder that the other
    one lacks or has without samples. tolerance: relative change up to which times count as equal.
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
    """Compare two result folders row by row.

    tolerance: relative change up to which times count as equal. Raises ``InvalidInputError`` for folders of different
    benchmarks, and ``UnavailableError`` if scipy is missing.

    Torch's own rows are compared only if the version of torch or the machine changed.
    """
    if before.header.subject_columns != after.header.subject_columns:
        raise InvalidInputError(
            f"{before.path} is of bench {before.header.benchmark}, {after.path} of bench {after.header.benchmark}: "
            "they have no rows in common; name two folders of the same benchmark"
        )
    same_torch = is_torch_the_same(before, after)
    mine, others = _timed(before, same_torch), _timed(after, same_torch)
    common = [key for key in mine if key in others]
    pairs = [_pair(mine[key], others[key]) for key in common]
    rows = tuple(
        ComparedRow(mine[key].line, others[key].line, pair.is_controlled, ratio, verdict)
        for key, pair, (ratio, verdict) in zip(common, pairs, judged(pairs, tolerance), strict=True)
    )
    only_before, only_after = (
        tuple(one.line for key, one in these.items() if key not in those)
        for these, those in ((mine, others), (others, mine))
    )
    return FolderComparison(before, after, rows, only_before, only_after, tolerance)


def is_torch_the_same(before: ResultFolder, after: ResultFolder) -> bool:
    """Whether both folders have the same torch and machine, so that times can be compared relative to torch's times."""
    mine, others = before.header.environment, after.header.environment
    return all(getattr(mine, name) == getattr(others, name) for name in _OF_TORCH)


class _Timed(NamedTuple):
    """A row of a result folder, with the logarithms of its samples.

    over_torch: logarithms of its samples over torch's samples of the same rounds, or None if torch was not timed then.
    """

    line: Line
    samples: Samples
    over_torch: Samples | None


def _timed(folder: ResultFolder, torch_controls: bool) -> dict[Key, _Timed]:
    """Return the rows of a folder that have samples, by key.

    torch_controls: whether rows are compared relative to torch's rows, which are then left out of the result.
    """
    lines = [line for line in folder.lines if line["samples_s"]]
    torchs = {subject_key(line, folder.header): line for line in lines if line["contestant"] == TORCH}
    found = {}
    for line in lines:
        if torch_controls and line["contestant"] == TORCH:
            continue
        samples, over_torch = np.log(line["samples_s"]), None
        torch = torchs.get(subject_key(line, folder.header)) if torch_controls else None
        if torch and torch["turns"] == line["turns"] and len(torch["samples_s"]) == len(samples):
            over_torch = samples - np.log(torch["samples_s"])
        found[row_key(line, folder.header)] = _Timed(line, samples, over_torch)
    return found


def _pair(before: _Timed, after: _Timed) -> Pair:
    if before.over_torch is None or after.over_torch is None:
        return Pair(before.samples, after.samples, is_controlled=False)
    return Pair(before.over_torch, after.over_torch, is_controlled=True)


def comparison_table(comparison: FolderComparison, *, all_rows: bool = False) -> Table:
    """Return a table of rows that became slower or faster, slowest first.

    all_rows: include the rows that stayed the same or are undecided.
    """
    shown = [Verdict.SLOWER, Verdict.FASTER, *((Verdict.UNDECIDED, Verdict.SAME) if all_rows else ())]
    printed = new_table(
        f"{comparison.after.path} against {comparison.before.path}",
        ("subject", "contestant", "verdict"),
        ("before", "after", "ratio", "95 % interval"),
    )
    for verdict in shown:
        for row in sorted(comparison.of(verdict), key=lambda row: -row.ratio.value):
            printed.add_row(
                *(_subject(comparison.before, row.before), _contestant(row.before), str(verdict)),
                *(_configuration(row.before), _configuration(row.after)),
                *(f"{row.ratio.value:.3f}", f"{row.ratio.low:.3f} to {row.ratio.high:.3f}"),
            )
    return printed


def in_words(comparison: FolderComparison) -> str:
    """Return a text on a comparison: counts, method, differences of the settings, and rows that only one folder has."""
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
            lines.append(f"only in {folder.path}: {len(only)} rows: {some(names, _MOST_LISTED)}")
        lines += folder.problems
    return "\n".join(lines)


def _subject(folder: ResultFolder, line: Line) -> str:
    """Return the name of a row's subject, from its text columns only, since sizes would fill the table."""
    return " ".join(line[name] for name in folder.header.subject_columns if isinstance(line[name], str))


def _contestant(line: Line) -> str:
    """Return the name of a row's contestant, the way of computing that was timed: ``mucudnn power-of-two 64 MiB``."""
    limit = None if line["limit_bytes"] is None else format_bytes(line["limit_bytes"])
    return " ".join(part for part in (line["contestant"], line["policy"], limit) if part)


def _configuration(line: Line) -> str:
    samples = sorted(line["samples_s"])
    middle = format_seconds(samples[len(samples) // 2])
    return f"{middle} {line['configuration']}" if line["configuration"] else middle
