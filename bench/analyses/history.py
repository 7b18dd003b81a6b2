"""The performance history of mucudnn on a machine, from result folders of the same layers for successive versions.

Versions are compared by their speedups over torch, which was timed interleaved with them, so that slow days of the
machine cancel out.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isnan
from pathlib import Path

from rich.table import Table

import mucudnn
from mucudnn.bench.analyses.comparison import FolderComparison, Verdict, compare_folders
from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.header import HEADER_FILE
from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.folders.rows import Key, subject_key
from mucudnn.bench.folders.speedups import Estimate, mean_speedup, speedup_of
from mucudnn.bench.report.records import Record
from mucudnn.bench.report.tables import new_table
from mucudnn.words.errors import InvalidInputError

OURS = "mucudnn"
_GIT_S = 10.0  # timeout of a git command
_SHOWN = 5  # the number of latest versions that the table of layers shows


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A measured version of mucudnn, named after its result folder.

    speedups: speedup over torch for each subject (layer and operation) that both mucudnn and torch ran. mean: their
    geometric mean. change: comparison with the previous version, or None for the first.
    """

    name: str
    folder: ResultFolder
    speedups: Mapping[Key, Estimate]
    mean: Estimate
    change: FolderComparison | None = None


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The measured versions of mucudnn, in the order of measurement. problems: messages about unreadable content."""

    path: Path
    versions: tuple[Version, ...]
    problems: tuple[str, ...] = ()

    @property
    def subjects(self) -> list[Key]:
        """Subjects (layer and operation) that any version measured, in the order in which they first appeared."""
        return list(dict.fromkeys(key for version in self.versions for key in version.speedups))


def read_history(path: Path, source: str, tolerance: float) -> History:
    """Read the result folders of this source among the subfolders of a folder; ignore all others.

    tolerance: relative change up to which times count as equal. Raises ``InvalidInputError`` if ``path`` is not a
    folder, and ``UnavailableError`` if scipy is missing.
    """
    if not path.is_dir():
        raise InvalidInputError(f"{path} is not a folder; mucudnn bench track creates it")
    folders: list[ResultFolder] = []
    problems: list[str] = []
    for header in sorted(path.glob(f"*/{HEADER_FILE}")):
        try:
            folder = read_folder(header.parent)
        except InvalidInputError as error:
            problems.append(str(error))
            continue
        if folder.header.source != source:
            continue
        problems += folder.problems
        if folders and folders[0].header.subject_columns != folder.header.subject_columns:
            problems.append(f"{folder.path} has different columns from {folders[0].path}; it is left out")
            continue
        folders.append(folder)
    folders.sort(key=lambda folder: (folder.header.date, folder.path.name))
    changes = [None, *(compare_folders(before, after, tolerance) for before, after in pairwise(folders))]
    versions = (_version(folder, change) for folder, change in zip(folders, changes, strict=False))
    return History(path, tuple(versions), tuple(problems))


def _version(folder: ResultFolder, change: FolderComparison | None) -> Version:
    torchs, ours = (
        {subject_key(line, folder.header): line for line in folder.lines if line["contestant"] == name}
        for name in (TORCH, OURS)
    )
    pairs = {
        key: (torchs[key]["samples_s"], line["samples_s"])
        for key, line in ours.items()
        if line["samples_s"] and key in torchs and torchs[key]["samples_s"] and torchs[key]["turns"] == line["turns"]
    }
    speedups = {key: speedup_of([torch], [ours]) for key, (torch, ours) in pairs.items()}
    return Version(folder.path.name, folder, speedups, mean_speedup(list(pairs.values())), change)


def versions_table(history: History) -> Table:
    """Return a table with a row for each version: mean speedup, and how many rows changed since the previous one."""
    printed = new_table(
        f"{history.path}: speedups over PyTorch in the same rounds",
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
    """Return a table of each operation's speedup in the latest versions, with the interval of the last one."""
    shown = history.versions[-_SHOWN:]
    titles = (*(version.name for version in shown), "95 % interval")
    printed = new_table("speedup over PyTorch of each operation", ("operation",), titles)
    for key in history.subjects:
        each = [version.speedups.get(key, Estimate()) for version in shown]
        printed.add_row(subject_name(key), *(_cells(one)[0] for one in each), _cells(each[-1])[1])
    return printed


def _cells(speedup: Estimate) -> tuple[str, str]:
    ratio = "" if isnan(speedup.value) else f"{speedup.value:.3f}"
    return ratio, "" if isnan(speedup.low) else f"{speedup.low:.3f} to {speedup.high:.3f}"


def subject_name(key: Key) -> str:
    """Return the name of a subject, from layer and operation only, because sizes would fill the table."""
    return " ".join(part for part in key[:2] if isinstance(part, str))


def slower_in_words(history: History) -> str:
    """Return a line for each operation that became slower in the last version; empty if none did."""
    last = history.versions[-1] if history.versions else None
    if last is None or last.change is None:
        return ""
    return "\n".join(
        f"slower since {last.change.before.path.name}: {row.after['layer']} {row.after['operation']}, "
        f"{row.ratio.value:.3f} times ({row.ratio.low:.3f} to {row.ratio.high:.3f})"
        for row in last.change.of(Verdict.SLOWER)
    )


def history_rows(history: History) -> list[Record]:
    """Return a CSV row for each version and subject (layer and operation)."""
    return [
        {
            "version": version.name,
            "date": version.folder.header.date.isoformat(),
            **dict(zip(version.folder.header.subject_columns, key, strict=True)),
            **speedup.columns("speedup{}"),
        }
        for version in history.versions
        for key, speedup in version.speedups.items()
    ]


def current_version() -> str:
    """Return a name for this version: mucudnn's version number and, in a checkout, the commit.

    ``-changed`` is appended if files differ from the commit.
    """
    describe = ("describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=-changed")
    call = ("git", "-C", str(Path(mucudnn.__file__).resolve().parent), *describe)
    try:
        commit = subprocess.run(call, capture_output=True, text=True, timeout=_GIT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # This is not a checkout, or git is missing.
        return mucudnn.__version__
    return f"{mucudnn.__version__}-{commit}"
