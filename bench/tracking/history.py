"""The history of a machine: result folders of the same layers, version after version.

Versions are put side by side by their speedups over torch, which ran in the same turns: the machine's slow days cancel.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

import mucudnn
from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.folders.header import HEADER_FILE
from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.folders.rows import Key, Line, subject_key
from mucudnn.bench.folders.speedups import CONFIDENCE, Speedup, resampled_medians, speedup_of
from mucudnn.bench.tracking.comparison import FolderComparison, compare_folders
from mucudnn.words.errors import InvalidInputError

OURS = "mucudnn"
_GIT_S = 10.0  # most seconds to wait for git


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A version that was measured, under the name of its folder.

    speedups: over torch, of each subject that both ran. mean: their geometric mean. change: against the version before;
    ``None``: there is none.
    """

    name: str
    folder: ResultFolder
    speedups: Mapping[Key, Speedup]
    mean: Speedup
    change: FolderComparison | None = None


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Versions in the order in which they were measured. problems: what could not be read, in words."""

    path: Path
    versions: tuple[Version, ...]
    problems: tuple[str, ...] = ()

    @property
    def subjects(self) -> list[Key]:
        """Subjects that any version has, in the order in which they came in."""
        return list(dict.fromkeys(key for version in self.versions for key in version.speedups))


def read_history(path: Path, source: str, tolerance: float) -> History:
    """Read the result folders in a folder that are of this source; others are passed over.

    tolerance: as for ``compare_folders``. Raises ``InvalidInputError`` where ``path`` is no folder, and
    ``UnavailableError`` where scipy is missing.
    """
    if not path.is_dir():
        raise InvalidInputError(f"{path} is no folder; mucudnn bench track makes it")
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
            problems.append(f"{folder.path} has other columns than {folders[0].path}; it is left out")
            continue
        folders.append(folder)
    folders.sort(key=lambda folder: (folder.header.date, folder.path.name))
    changes = [None, *(compare_folders(before, after, tolerance) for before, after in pairwise(folders))]
    versions = (_version(folder, change) for folder, change in zip(folders, changes, strict=False))
    return History(path, tuple(versions), tuple(problems))


def _version(folder: ResultFolder, change: FolderComparison | None) -> Version:
    pairs = _pairs(folder)
    speedups = {key: speedup_of([torch], [ours]) for key, (torch, ours) in pairs.items()}
    return Version(folder.path.name, folder, speedups, mean_speedup(list(pairs.values())), change)


def _pairs(folder: ResultFolder) -> dict[Key, tuple[Sequence[float], Sequence[float]]]:
    """Return torch's samples and ours of each subject that has both, of the same turns."""
    by_contestant: dict[str, dict[Key, Line]] = {TORCH: {}, OURS: {}}
    for line in folder.lines:
        if line["contestant"] in by_contestant and line["samples_s"]:
            by_contestant[line["contestant"]][subject_key(line, folder.header)] = line
    torchs = by_contestant[TORCH]
    return {
        key: (torchs[key]["samples_s"], line["samples_s"])
        for key, line in by_contestant[OURS].items()
        if key in torchs and torchs[key]["turns"] == line["turns"]
    }


def mean_speedup(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Speedup:
    """Return the geometric mean of the speedups of subjects, with the percentile bootstrap's interval over rounds.

    pairs: torch's samples and ours of each subject, sample i of both being from round i. Rounds of different subjects
    are drawn independently. NaN for no subjects; no interval where a subject has none.

    >>> mean_speedup([([0.4] * 3, [0.2] * 3), ([0.8] * 3, [0.1] * 3)])
    Speedup(ratio=4.0, low=4.0, high=4.0)
    """
    each = [speedup_of([torch], [ours]) for torch, ours in pairs]
    if not each:
        return Speedup()
    ratio = float(np.exp(np.mean(np.log([one.ratio for one in each]))))
    if np.isnan([one.low for one in each]).any():
        return Speedup(ratio)
    drawn = [
        np.log(resampled_medians(tuple(torch), seed) / resampled_medians(tuple(ours), seed))
        for seed, (torch, ours) in enumerate(pairs)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.exp(np.quantile(np.mean(drawn, axis=0), (tail, 1 - tail)))
    return Speedup(ratio, float(low), float(high))


def current_version() -> str:
    """Name this version: mucudnn's own and, in a checkout, the commit, with ``-changed`` if files differ from it."""
    commit, status = (_git(*command) for command in (("rev-parse", "--short=8", "HEAD"), ("status", "--porcelain")))
    if commit is None:
        return mucudnn.__version__
    return f"{mucudnn.__version__}-{commit}{'-changed' if status else ''}"


def _git(*command: str) -> str | None:
    """Run git on the files of this package; ``None``: they are in no checkout, or there is no git."""
    call = ("git", "-C", str(Path(mucudnn.__file__).resolve().parent), *command)
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
