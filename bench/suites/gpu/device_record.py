"""``python -m mucudnn.bench.suites.gpu.device_record``: records the device that is measured on, and all versions."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import click
import torch

import mucudnn
from mucudnn.bench.report.export import json_text
from mucudnn.bench.report.records import FORMAT_VERSION, Record
from mucudnn.kernels.cudnn.device import Device, current_device
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.running.environment import current_environment
from mucudnn.terminal.console import ModuleCommand

_DISTRIBUTIONS = ("numpy", "pandas", "pulp", "triton")
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_QUERIED = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"


def device_record(device: str) -> Record:
    """Record of a device and of all versions.

    ``properties``: cuDNN's description of the device (see ``kernels/cudnn/device.py``). ``nvidia_smi``: its lines for
    all devices, empty where there is no nvidia-smi.

    Raises ``UnavailableError`` for a device that is not there, saying what is missing.
    """
    return {
        "format_version": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": asdict(current_environment(device)),
        "versions": _versions(),
        "properties": properties_of(current_device()) if device == "cuda" else None,
        "nvidia_smi": _nvidia_smi() if device == "cuda" else [],
    }


def _versions() -> dict[str, str | None]:
    """Versions by name; ``None``: not installed."""
    return {
        "mucudnn": mucudnn.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cupy": next(filter(None, map(_version, _CUPY)), None),
        **{name: _version(name) for name in _DISTRIBUTIONS},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def properties_of(device: Device) -> Record:
    """cuDNN's description of the device, or why there is none: a record beside measurements must not cost them."""
    try:
        properties: Record = json.loads(device.properties_json)
    except (CudnnError, ValueError) as error:
        return {"unknown": str(error)}
    return properties


def _nvidia_smi() -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-gpu={_QUERIED}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    names = _QUERIED.split(",")
    return [dict(zip(names, (value.strip() for value in line.split(",")), strict=False)) for line in lines]


@click.command(cls=ModuleCommand)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(device: str) -> None:
    """Print what is measured on, as JSON."""
    click.echo(json_text(device_record(device)), nl=False)


if __name__ == "__main__":
    main()
