"""Writes a result folder row by row, so that a killed process loses at most the row that it was writing.

A benchmark that is started again with the same settings resumes where it stopped.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.results.reading import (
    CONTESTANT,
    FORMAT_VERSION,
    HEADER_FILE,
    ROWS_FILE,
    SUMMARY_FILE,
    Header,
    Key,
    Line,
    Subject,
    incomplete_turns,
    read_header,
    read_rows,
    subject_key,
)
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, OutputError
from mucudnn.core.files import explained, json_line, write_json
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.values import grouped
from mucudnn.measuring.load import Load, Watch

_DECIDE_NOTHING = ("confirm", "keep_heap", "database")  # fields of a config


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one contestant (such as torch or mucudnn) on one subject (such as an operation of a layer).

    samples_s: seconds, in the order of the rounds; empty if the contestant failed or the benchmark does not time.
    policy: batch-size policy under which the configuration was chosen; None for contestants without such a choice.
    limit_bytes: workspace limit under which it was chosen; None without such a choice, and if there is no limit.
    failure: why the contestant failed, or None.
    more: columns that only this benchmark has.
    """

    subject: Subject
    contestant: str
    samples_s: Sequence[float] = ()
    policy: str | None = None
    limit_bytes: int | None = None
    configuration: str | None = None
    workspace_bytes: int | None = None
    relative_error: float | None = None
    failure: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def config_record(config: Config) -> dict[str, Any]:
    """Return the settings of a config that decide what is measured, as JSON values."""
    return {name: value for name, value in asdict(config).items() if name not in _DECIDE_NOTHING}


class FolderWriter:
    """A result folder that is open for writing by this process; created by ``open_folder``."""

    def __init__(self, path: Path, header: Header, stream: IO[bytes], lines: Sequence[Line]) -> None:
        """Continue after the lines that the folder has."""
        self.path, self.header = path, header
        self._stream = stream
        incomplete = incomplete_turns(lines)
        complete = (line for line in lines if line["turns"] not in incomplete)
        self._known = grouped((subject_key(line, header), line) for line in complete)
        self._measured = set(self._known)
        self._turns = max((line["turns"] for line in lines), default=0)

    def known(self, subject: Subject) -> list[Line]:
        """Return the rows that an earlier run measured for a subject; empty if it has not been measured yet."""
        return self._known.get(subject_key(subject, self.header), [])

    def add(self, rows: Sequence[Row], load: Load | None = None) -> None:
        """Write to disk the rows of contestants that were timed interleaved.

        load: how busy the machine was during the measurement.

        Raises ``OutputError`` if the rows cannot be written.
        """
        self._turns += 1
        load = load or Load()
        lines = [
            json_line(
                {
                    "format_version": FORMAT_VERSION,
                    "folder": self.header.identity,
                    "turns": self._turns,
                    "rows_in_turns": len(rows),
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    **{name: row.subject[name] for name in self.header.subject_columns},
                    **{name: getattr(row, name) for name in CONTESTANT},
                    **{name: getattr(row, name) for name in ("configuration", "workspace_bytes", "relative_error")},
                    "failure": row.failure,
                    **row.more,
                    "load": load.share,
                    **asdict(load),
                    "samples_s": list(row.samples_s),
                }
            )
            for row in rows
        ]
        with explained(self.path / ROWS_FILE):
            self._stream.write("".join(lines).encode())
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self._measured |= {subject_key(row.subject, self.header) for row in rows}

    def improve_limits(self, limits: Mapping[str, MachineLimits]) -> None:
        """Raise the stored peak rates of the machine to these if they are higher.

        Raises ``OutputError`` if the rates cannot be written.
        """
        stored = self.header.limits
        better = {dtype: rates.or_better(stored.get(dtype, rates)) for dtype, rates in limits.items()}
        if {**stored, **better} != stored:
            self.header = replace(self.header, limits={**stored, **better})
            write_json(self.path / HEADER_FILE, self.header.record())

    def write_summary(self, left_out: Iterable[tuple[str, str]] = ()) -> None:
        """Write ``summary.json``: the number of measured subjects, and the unmeasured subjects with the reasons."""
        write_json(
            self.path / SUMMARY_FILE,
            {
                "format_version": FORMAT_VERSION,
                "folder": self.header.identity,
                "wanted": self.header.wanted,
                "measured": len(self._measured),
                "left_out": [{"what": subject, "reason": reason} for subject, reason in left_out],
            },
        )


@contextmanager
def open_folder(path: Path, header: Header) -> Iterator[FolderWriter]:
    """Open a result folder for writing; resume it if an earlier run with the same settings created it.

    Raises ``InvalidInputError`` with a list of differences for a folder with other settings, and ``OutputError`` if the
    folder cannot be written, is not a result folder, or is being written by another process.
    """
    if (path / HEADER_FILE).exists():
        stored = read_header(path)
        if differences := stored.differences(header):
            raise InvalidInputError(
                f"{path} has results of other settings: {'; '.join(differences)}; name another folder, or use the same"
            )
        header = stored
    else:
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            strange = sorted(file.name for file in path.iterdir())
        if strange:
            raise OutputError(f"{path} is not a result folder: it contains {strange[0]}; name a new or empty folder")
        write_json(path / HEADER_FILE, header.record())
    rows = path / ROWS_FILE
    with explained(rows):
        stream = rows.open("ab")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(
                f"{path} is being written by another process; wait for it, or name another folder"
            ) from error
        if rows.read_bytes()[-1:] not in (b"", b"\n"):
            stream.write(b"\n")  # ends a line that a killed process left incomplete
            stream.flush()
        lines, _ = read_rows(rows, header)
        yield FolderWriter(path, header, stream, lines)


def write_missing(
    path: Path,
    header: Header,
    wanted: Mapping[Key, Callable[[Subject, Progress], Iterable[Row]]],
    progress: Progress = silent,
    watch: Watch | None = None,
    left_out: Iterable[tuple[str, str]] = (),
) -> None:
    """Measure the subjects that a folder still lacks, and write its summary.

    wanted: a function for each subject, by the values of the subject's columns; it is called with the subject and its
    share of the progress bar, and returns the subject's rows.
    watch: reads the load of the machine.
    left_out: what cannot be measured, and the reason.

    Raises the errors of ``open_folder`` and of the functions.
    """
    watch = watch or Watch()
    with open_folder(path, header) as folder:
        for index, (values, rows_of) in enumerate(wanted.items()):
            subject = dict(zip(header.subject_columns, values, strict=True))
            if not folder.known(subject):
                mark = watch.mark()
                rows = [*rows_of(subject, share_of(progress, index / len(wanted), 1 / len(wanted)))]
                folder.add(rows, watch.since(mark))
        folder.write_summary(left_out)
