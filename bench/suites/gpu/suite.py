"""Runs the tests of a GPU and the benchmarks on it: ``make gpu``, or ``python -m mucudnn.bench.suites.gpu.suite``.

Needs no network and no installation: a Python with mucudnn's dependencies and pytest, and this repository on its
PYTHONPATH. Installed from a wheel it has no tests, and runs the benchmarks alone. Each part (``parts.py``) is a process
of its own with a share of the time, and is ended when that is over. One that fails does not stop the others.
``summary.json`` and the archive are written anew after each part, so that a run that is killed has told what it has.
Not run on a GPU yet.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import click

from mucudnn.bench.report.export import write_json
from mucudnn.bench.suites.gpu import parts as suite_parts
from mucudnn.bench.suites.gpu.parts import SuitePart, parts
from mucudnn.terminal.console import ModuleCommand
from mucudnn.terminal.whole_files import whole_file

_RESERVE_S = 5.0  # for files that are written after the last part
_GRACE_S = 8.0  # between asking a process to end, as Ctrl-C does, and killing it
_NEEDED = 0.85  # the fraction of its limit that a command is told to take
_TAIL_LINES = 40
_NO_TESTS = "mucudnn is installed, and the tests of a GPU are in its checkout and its sdist: only the benchmarks run"


class PartStatus(StrEnum):
    WAITING = "not begun"
    RUNNING = "running"
    PASSED = "passed"
    FAILED = "failed"
    STOPPED = "stopped: its time was over"
    LEFT_OUT = "left out: the time was over"


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """Outcome of a part. seconds, exit_code: ``None`` before its end. tail: the last lines of its log."""

    name: str
    command: str
    status: PartStatus = PartStatus.WAITING
    seconds: float | None = None
    exit_code: int | None = None
    tail: str = ""


class Suite:
    """Run of some parts on one device, with results in one folder."""

    def __init__(self, device: dict[str, Any], out: Path, archive: Path | None, wanted: Sequence[SuitePart]) -> None:
        """device: the record of ``device_record``."""
        self.device, self.out, self.archive = device, out, archive
        self.outcomes = {part: PartOutcome(part.name, " ".join(_command(part, out, 0.0))) for part in wanted}

    def run(self, end_s: float) -> bool:
        """Run all parts, until ``end_s`` of the monotonic clock. Returns whether all passed."""
        self._write()
        for part in self.outcomes:
            limit_s = part.share * (end_s - _RESERVE_S - _GRACE_S - time.monotonic())
            if limit_s <= 1:
                self._note(part, status=PartStatus.LEFT_OUT)
            else:
                self._run(part, limit_s)
        return all(outcome.status is PartStatus.PASSED for outcome in self.outcomes.values())

    def _run(self, part: SuitePart, limit_s: float) -> None:
        command, log = _command(part, self.out, limit_s), self.out / f"{part.name}.log"
        self._note(part, command=" ".join(command), status=PartStatus.RUNNING)
        click.echo(f"{part.name}: at most {limit_s:.0f} s", err=True)
        begun_s = time.monotonic()
        exit_code, in_time = _ended(command, log, limit_s, self.out / "measurements.sqlite")
        passed = PartStatus.PASSED if exit_code == 0 else PartStatus.FAILED
        seconds = round(time.monotonic() - begun_s, 1)
        status = passed if in_time else PartStatus.STOPPED
        self._note(part, status=status, seconds=seconds, exit_code=exit_code, tail=_tail(log))
        click.echo(f"{part.name}: {status}, {seconds:.0f} s", err=True)

    def _note(self, part: SuitePart, **changes: Any) -> None:
        self.outcomes[part] = replace(self.outcomes[part], **changes)
        self._write()

    def _write(self) -> None:
        """Write summary and archive. Each file is whole at any moment."""
        summary = {**self.device, "parts": [asdict(outcome) for outcome in self.outcomes.values()]}
        write_json(self.out / "summary.json", summary)
        if self.archive is not None:
            with whole_file(self.archive) as packed, tarfile.open(fileobj=packed, mode="w:gz") as archive:
                archive.add(self.out, arcname=self.out.name)


def _command(part: SuitePart, out: Path, limit_s: float) -> list[str]:
    known = {"out": str(out), "seconds": f"{_NEEDED * limit_s:.0f}"}
    return [sys.executable, "-m", *(argument.format(**known) for argument in part.arguments)]


def _ended(command: Sequence[str], log: Path, limit_s: float, database: Path) -> tuple[int, bool]:
    """Run a command. Returns its exit code, and whether it ended by itself.

    Out of time, it is asked to end, then killed with all its children.
    """
    environment = {**os.environ, "MUCUDNN_DATABASE": str(database), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, start_new_session=True
        )
        try:
            return process.wait(limit_s), True
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            return process.returncode or -signal.SIGKILL, False
        finally:  # also after Ctrl-C, which does not reach another session
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])


def record_device(device: str) -> dict[str, Any]:
    """Record the device in another process, so that this one takes no memory of it.

    Raises ``ClickException`` where there is none.
    """
    command = [sys.executable, "-m", "mucudnn.bench.suites.gpu.device_record", "--device", device]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise click.ClickException(asked.stderr.strip().removeprefix("Error: "))
    record: dict[str, Any] = json.loads(asked.stdout)
    return record


def folder_of(device: dict[str, Any]) -> Path:
    """``bench/results/nvidia-h200`` of the checkout; ``mucudnn-results/nvidia-h200`` here where there is none."""
    results = Path("mucudnn-results") if suite_parts.ROOT is None else suite_parts.ROOT / "bench" / "results"
    return results / re.sub(r"[^a-z0-9]+", "-", device["environment"]["device"].lower()).strip("-")


def _chosen(device: str, only: str | None) -> list[SuitePart]:
    every = parts(device)
    wanted = tuple(name.strip() for name in (only or "").split(","))
    chosen = [part for part in every if part.name.startswith(wanted)]
    if not chosen:
        names = ", ".join(part.name for part in every)
        raise click.BadParameter(f"{only!r} begins the name of no part; there are {names}", param_hint="--only")
    return chosen


@click.command(cls=ModuleCommand)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=9.0, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--only", metavar="NAME,...", help="Only the parts whose names begin so; default: all.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the results; default: by the device."
)
@click.option(
    "--archive", type=click.Path(dir_okay=False, path_type=Path), help="Pack the folder into this .tar.gz, too."
)
def main(minutes: float, device: str, only: str | None, out: Path | None, archive: Path | None) -> None:
    """Run the tests of a GPU, then benchmarks on it, in so many minutes. Status 1: not all passed.

    The benchmarks are those of engines, limits, overhead, networks and training steps. The tests are in mucudnn's
    checkout and its sdist; installed from a wheel only the benchmarks run.
    """
    end_s = time.monotonic() + 60 * minutes
    if suite_parts.ROOT is None:
        click.echo(_NO_TESTS, err=True)
    wanted = _chosen(device, only)
    record = record_device(device)
    folder = (out or folder_of(record)).resolve()
    if archive is not None and archive.resolve().is_relative_to(folder):
        raise click.BadParameter(
            f"{archive} lies in {folder}, which it packs: name another place", param_hint="--archive"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if archive is not None:
        archive.resolve().parent.mkdir(parents=True, exist_ok=True)
    passed = Suite(record, folder, archive, wanted).run(end_s)
    click.echo(f"{folder / 'summary.json'} tells how each part went")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
