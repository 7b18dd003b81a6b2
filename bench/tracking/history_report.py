"""Tells the history of a machine: tables over versions."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

from rich.table import Table

from mucudnn.bench.folders.rows import Key
from mucudnn.bench.folders.speedups import Speedup
from mucudnn.bench.report.records import Record
from mucudnn.bench.report.tables import new_table
from mucudnn.bench.tracking.history import History, Version
from mucudnn.bench.tracking.verdicts import Verdict

_SHOWN = 5  # versions beside each other in the table of layers


def versions_table(history: History) -> Table:
    """Return a row for each version: geometric mean of its speedups, and what changed since the one before."""
    printed = new_table(
        f"{history.path}: speedups over torch in the same rounds",
        ("version", "measured"),
        ("timed", "geometric mean", "95 % interval", *Verdict),
    )
    for version in history.versions:
        change = version.change
        counts = ("",) * len(Verdict) if change is None else (str(len(change.of(one))) for one in Verdict)
        measured = version.folder.header.date.strftime("%Y-%m-%d %H:%M")
        printed.add_row(version.name, measured, str(len(version.speedups)), *_cells(version.mean), *counts)
    printed.caption = "slower, faster, same, undecided: rows against the version before"
    return printed


def subjects_table(history: History) -> Table:
    """Return a row for each operation of each layer, with its speedup in the last versions, and the last interval."""
    shown = history.versions[-_SHOWN:]
    titles = (*(version.name for version in shown), "95 % interval")
    printed = new_table("speedup over torch of each operation", ("operation",), titles)
    for key in history.subjects:
        each = [version.speedups.get(key, Speedup()) for version in shown]
        printed.add_row(subject_name(key), *(_cells(one)[0] for one in each), _cells(each[-1])[1])
    return printed


def _cells(speedup: Speedup) -> tuple[str, str]:
    ratio = "" if isnan(speedup.ratio) else f"{speedup.ratio:.3f}"
    return ratio, "" if isnan(speedup.low) else f"{speedup.low:.3f} to {speedup.high:.3f}"


def subject_name(key: Key) -> str:
    """Name a subject by the texts in its key that tell layers and operations apart: sizes would fill the table."""
    return " ".join(part for part in key[:2] if isinstance(part, str))


def slower_in_words(history: History) -> str:
    """Say which rows became slower with the last version; empty: none."""
    last = history.versions[-1] if history.versions else None
    if last is None or last.change is None:
        return ""
    return "\n".join(
        f"slower since {last.change.before.path.name}: {row.after['layer']} {row.after['operation']}, "
        f"{row.change.ratio:.3f} times ({row.change.low:.3f} to {row.change.high:.3f})"
        for row in last.change.of(Verdict.SLOWER)
    )


def history_rows(history: History) -> list[Record]:
    """Return lines of a CSV file: one for each version and subject."""
    return [row for version in history.versions for row in _rows(version)]


def _rows(version: Version) -> Iterator[Record]:
    header = version.folder.header
    for key, speedup in version.speedups.items():
        yield {
            "version": version.name,
            "date": header.date.isoformat(),
            **dict(zip(header.subject_columns, key, strict=True)),
            **{"speedup": speedup.ratio, "speedup_low": speedup.low, "speedup_high": speedup.high},
        }
