"""``mucudnn doctor``: hardware, libraries and algorithms of this machine, and how to get what is missing."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from textwrap import fill
from typing import TYPE_CHECKING

import click

from mucudnn.cli.shared.commands import FileCommand
from mucudnn.core.errors import DatabaseError, MucudnnError, UnavailableError, first_line
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import package_of
from mucudnn.core.values import format_bytes

if TYPE_CHECKING:
    from mucudnn.measuring.load import Watch

Finding = tuple[str, str]  # name of a component; what the machine has of it, or lacks, and how to get it
_COLUMNS, _INDENT = 100, 17
_EXAMPLE = ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, padding=(1, 1))  # for which cuDNN lists its engines


@click.command(cls=FileCommand)
def doctor() -> None:
    """Show what this machine has: processor, GPUs, libraries and algorithms; and how to get what is missing."""
    for name, text in (*machine(), *accelerators(), *packages()):
        line = f"{name:{_INDENT}}{text}"
        click.echo(fill(line, _COLUMNS, subsequent_indent=" " * _INDENT, break_on_hyphens=False))


def machine() -> Iterator[Finding]:
    """Yield findings on the CPU and its load, PyTorch and its libraries, our compiled code, and the database."""
    from mucudnn.measuring.load import Processors, watch_of
    from mucudnn.running.devices import current_environment

    here = current_environment()
    yield "CPU", f"{here.device}, {os.cpu_count()} logical cores, PyTorch uses {here.capability}"
    yield "threads", threads(here.threads, Processors().allowed_cores())
    yield "load", load(watch_of("cpu"))
    yield "torch", f"{here.torch}, {here.library}"
    yield "compiled code", compiled()
    yield "algorithms", ", ".join(usable("cpu"))
    yield "proving process", proving()
    yield "database", database()


def threads(number: int, allowed: float) -> str:
    """Compare PyTorch's number of threads with the number of cores that this process may use."""
    from mucudnn.measuring.load import too_many_threads

    cores = f"{number}; this process may use {allowed:g} core{'' if allowed == 1 else 's'}"
    return ": ".join(filter(None, (cores, too_many_threads(number, allowed))))


def load(watch: Watch) -> str:
    """Describe the load of the machine by other processes, which is watched for half a second."""
    mark = watch.mark()
    watch.pause()
    foreign = watch.since(mark)
    return str(foreign) if foreign.is_quiet else f"{foreign}; end other processes, or measure later"


def compiled() -> str:
    """Describe the loaded build of mucudnn's own C++ code, or the reason why there is none."""
    from mucudnn.kernels.compiled.library import bfloat16_products, builds, loaded_build, shortcoming
    from mucudnn.running.eager.hot_path import extension

    build = loaded_build()
    words = [f"none, so that only algorithms on PyTorch's operators run: {build.why_not_compiled}"]
    if build.library is not None:
        runs = f"built for {', '.join(builds())}; bfloat16 is multiplied in {bfloat16_products()}"
        words = [runs, shortcoming() or f"{build.name} runs"]
    if extension is None:
        words.append("calls go through Python, since nothing is compiled for it, or torch is too old for that")
    return "; ".join(words)


def usable(device_type: str) -> list[str]:
    """Return the names of the algorithms that compute something here: those that are not compiled refuse everything."""
    from mucudnn.kernels.algorithm import why_unsupported
    from mucudnn.kernels.registry import algorithms
    from mucudnn.testing.contract import GEOMETRIES, VOLUMES, geometry

    cases = product((*GEOMETRIES, *VOLUMES), MemoryFormat)
    problems = [geometry(name, Operation.FORWARD, memory_format=form)[0] for name, form in cases]
    problems.append(ConvProblem(Operation.FORWARD, 3, 9, 9, 3, 5, 5, stride=(2, 2)))
    return [
        algorithm.name
        for algorithm in algorithms(device_type)
        if package_of(algorithm.name) or any(why_unsupported(algorithm, problem) is None for problem in problems)
    ]


def proving() -> str:
    """Describe the proving process for foreign code, and the checks that guard its heap."""
    from mucudnn.measuring.proving.prover import prover

    try:
        checks = prover().heap_checks()
    except OSError as error:
        return f"none: {first_line(error)}; code of libraries is not tried: let this process start others"
    return ", ".join(f"{'with' if is_active else 'without'} {name}" for name, is_active in checks.items())


def database() -> str:
    """Open the database as tuning does; return its path, or what is wrong with it."""
    from mucudnn.store.database import Database

    try:
        with warnings.catch_warnings(record=True, action="always") as warned, Database(timeout_s=1.0) as opened:
            told = f"{opened.path}{' can only be read, so that new results are lost' if opened.read_only else ''}"
    except DatabaseError as error:
        return str(error).removeprefix("database ")
    return str(warned[0].message).removeprefix("database ") if warned else told


def accelerators() -> Iterator[Finding]:
    """Yield findings on GPUs with their algorithms, the GPU driver, cuDNN and CuPy."""
    from mucudnn.kernels.cudnn.library import library
    from mucudnn.kernels.winograd.cupy_launcher import how_to_install
    from mucudnn.running.devices import require_cuda

    try:
        require_cuda()
        yield from _gpus()
    except UnavailableError as error:
        yield "GPU", f"none: {str(error).removeprefix('device is ' + repr('cuda') + ', but ')}"
    try:
        yield "cuDNN", f"{library().version_text}, {library().path}"
    except UnavailableError as error:
        yield "cuDNN", f"none: {error}"
    try:
        yield "CuPy", import_module("cupy").__version__ if find_spec("cupy") else f"none: {how_to_install()}"
    except Exception as error:  # loading libraries can fail in any way
        yield "CuPy", f"cannot be imported: {first_line(error)}; fix that, or {how_to_install()}"


def _gpus() -> Iterator[Finding]:
    import torch

    from mucudnn.kernels.registry import sources

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        driver = f"unknown: {error}"
    yield "driver", f"{driver}; PyTorch is built for CUDA {torch.version.cuda}"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            names = usable("cuda")
            try:
                for source in sources("cuda"):
                    names.append(f"{source.name} ({len(source.offered(_EXAMPLE, [32]))} for 3x3)")
            except MucudnnError:
                names.append("none of cuDNN")
        properties = f"{gpu.name}, sm{gpu.major}{gpu.minor}, {format_bytes(gpu.total_memory)}"
        yield f"cuda:{index}", f"{properties}; {', '.join(names)}"


def packages() -> Iterator[Finding]:
    """Yield findings on installed packages that provide algorithms."""
    from mucudnn.kernels.registry import installed_plug_ins

    for plug_in in installed_plug_ins():
        lack = f"none: {plug_in.error}; fix it, or pip uninstall {plug_in.name}"
        yield plug_in.package, lack if plug_in.error else f"brings {', '.join(plug_in.algorithms)}"
