"""``python -m mucudnn.bench.suites.gpu.engine_differences FILE``: compares engines of a described and a real device.

cuDNN lists engines for a device that need not be here (``mucudnn engines --device-properties``). On a machine that has
one, its own lists are compared with those of its description. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import click

import mucudnn
from mucudnn.bench.report.export import write_json
from mucudnn.bench.report.records import FORMAT_VERSION, Record
from mucudnn.bench.suites.gpu.device_record import properties_of
from mucudnn.bench.suites.gpu.record_engines import MICRO_BATCH_SIZES, device_properties_option, recorded_problems
from mucudnn.kernels.cudnn.device import current_device, described_device
from mucudnn.kernels.cudnn.engines import Engine
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.terminal.command_files import OutputFile
from mucudnn.terminal.console import ModuleCommand
from mucudnn.words.problem import ConvProblem


class Lists(Protocol):
    """Lists of engines of one device."""

    def engines(self, problem: ConvProblem, n: int) -> list[Engine]:
        """Engines for ``n`` samples, best first. Raises ``CudnnError`` where none can be listed."""


def differences(
    live: Lists, described: Lists, problems: Iterable[ConvProblem], sizes: Sequence[int] = MICRO_BATCH_SIZES
) -> list[Record]:
    """One record for each problem and micro-batch size with differing lists.

    only_live, only_described: names of engine configurations. changed: names in both lists, with other notes or another
    workspace. same_order: whether names in both lists have the same order.
    """
    pairs = ((problem, n) for problem in problems for n in sizes)
    records = (
        _difference(problem, n, _engines(live, problem, n), _engines(described, problem, n)) for problem, n in pairs
    )
    return [record for record in records if record is not None]


def _engines(device: Lists, problem: ConvProblem, n: int) -> dict[str, Engine]:
    """Engines by name, best first."""
    try:
        return {engine.config.name: engine for engine in device.engines(problem, n)}
    except CudnnError as error:
        if error.is_unsupported:
            return {}
        raise


def _difference(problem: ConvProblem, n: int, live: dict[str, Engine], described: dict[str, Engine]) -> Record | None:
    if list(live.items()) == list(described.items()):
        return None
    return {
        "problem": asdict(problem),
        "micro_batch_size": n,
        "common": len(live.keys() & described.keys()),
        "only_live": [name for name in live if name not in described],
        "only_described": [name for name in described if name not in live],
        "changed": [name for name in live if name in described and live[name] != described[name]],
        "same_order": [name for name in live if name in described] == [name for name in described if name in live],
    }


@click.command(cls=ModuleCommand)
@click.argument("file", type=OutputFile())
@device_properties_option
def main(file: Path, device_properties: str) -> None:
    """Compare what cuDNN offers on this GPU and for a described one, for some problems; write it to FILE (JSON)."""
    live, described = current_device(), described_device(device_properties)
    problems = list(recorded_problems())
    found = differences(live, described, problems)
    record = {
        "format_version": FORMAT_VERSION,
        "mucudnn": mucudnn.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cudnn": live.library.version_text,
        "device": properties_of(live),
        "described": properties_of(described),
        "lists": len(problems) * len(MICRO_BATCH_SIZES),
        "differences": found,
    }
    write_json(file, record)
    changed = sum(bool(difference["changed"]) for difference in found)
    click.echo(f"{len(found)} of {record['lists']} lists differ, {changed} of them in notes or workspaces")


if __name__ == "__main__":
    main()
