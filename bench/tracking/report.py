"""Tells what a comparison of two result folders found: rows that changed, counts, and what is missing."""

from __future__ import annotations

from rich.table import Table

from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import Line
from mucudnn.bench.report.tables import new_table
from mucudnn.bench.tracking.comparison import ComparedRow, FolderComparison
from mucudnn.bench.tracking.verdicts import FAMILY_LEVEL, PHASE, Verdict
from mucudnn.words.units import format_bytes, format_seconds

_MOST_LISTED = 10


def comparison_table(comparison: FolderComparison, *, all_rows: bool = False) -> Table:
    """Return the rows that became slower or faster, the slowest first; all_rows: the others, too."""
    shown = [Verdict.SLOWER, Verdict.FASTER, *((Verdict.UNDECIDED, Verdict.SAME) if all_rows else ())]
    printed = new_table(
        f"{comparison.after.path} against {comparison.before.path}",
        ("subject", "contestant", "verdict"),
        ("before", "after", "ratio", "95 % interval"),
    )
    for verdict in shown:
        for row in sorted(comparison.of(verdict), key=lambda row: -row.change.ratio):
            printed.add_row(*_cells(comparison, row))
    return printed


def _cells(comparison: FolderComparison, row: ComparedRow) -> tuple[str, ...]:
    change = row.change
    return (
        *(_subject(comparison.before, row.before), _contestant(row.before), str(change.verdict)),
        *(_configuration(row.before), _configuration(row.after)),
        f"{change.ratio:.3f}",
        f"{change.low:.3f} to {change.high:.3f}",
    )


def in_words(comparison: FolderComparison) -> str:
    """Return the counts, what was measured how, what differs between the folders, and what only one of them has."""
    rows = comparison.rows
    counts = ", ".join(f"{len(comparison.of(verdict))} {verdict}" for verdict in Verdict)
    lines = [
        f"{len(rows)} rows are in both: {counts}; changes up to {comparison.tolerance:.0%} count as none",
        f"ratio: time after / time before{_measured_by(comparison)}; at level {FAMILY_LEVEL:g} for all rows together",
    ]
    if uncontrolled := sum(not row.is_controlled for row in rows):
        lines.append(
            f"{uncontrolled} rows have no torch of the same kind beside them in both folders: slow phases of the "
            f"machine do not cancel, so that they are slower or faster only beyond a ratio of {PHASE:.2f}"
        )
    if differences := comparison.before.header.differences(comparison.after.header):
        lines.append(f"between the folders: {'; '.join(differences)}")
    for folder, only in ((comparison.before, comparison.only_before), (comparison.after, comparison.only_after)):
        if only:
            lines.append(f"only in {folder.path}: {_listed(folder, only)}")
        lines += folder.problems
    return "\n".join(lines)


def _measured_by(comparison: FolderComparison) -> str:
    return ", each over torch's time in the same round" if comparison.is_torch_the_same else ""


def _listed(folder: ResultFolder, only: tuple[Line, ...]) -> str:
    names = [f"{_subject(folder, line)} {_contestant(line)}" for line in only[:_MOST_LISTED]]
    more = f"; and {len(only) - _MOST_LISTED} more" if len(only) > _MOST_LISTED else ""
    return f"{len(only)} rows: {'; '.join(names)}{more}"


def _subject(folder: ResultFolder, line: Line) -> str:
    """Return the names among the columns of a subject: sizes would fill the table."""
    return " ".join(line[name] for name in folder.header.subject_columns if isinstance(line[name], str))


def _contestant(line: Line) -> str:
    """``mucudnn power-of-two 64 MiB``."""
    limit = None if line["limit_bytes"] is None else format_bytes(line["limit_bytes"])
    return " ".join(part for part in (line["contestant"], line["policy"], limit) if part)


def _configuration(line: Line) -> str:
    samples = sorted(line["samples_s"])
    middle = format_seconds(samples[len(samples) // 2])
    return f"{middle} {line['configuration']}" if line["configuration"] else middle
