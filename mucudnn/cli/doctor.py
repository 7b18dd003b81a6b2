"""``mucudnn doctor``: hardware, libraries and available algorithms of this machine, and how to get the others."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from mucudnn.terminal.files import FileCommand
from mucudnn.words.errors import first_line
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from mucudnn.database.schema import Row
    from mucudnn.kernels.contract.algorithm import Algorithm, AlgorithmSource
    from mucudnn.measuring.timing.load import Watch
    from mucudnn.running.environment import Environment
    from mucudnn.words.errors import UnavailableError


class Finding(NamedTuple):
    """A component that the machine has or lacks; ``remedy`` says how to get it, or is empty.

    For an algorithm, ``state`` lists the kinds of convolution that it computes, and ``remedy`` the reasons against the
    others.
    """

    name: str
    state: str
    remedy: str = ""


_REMEDY = re.compile(r"[;:] (?=install |pip install |see )")  # separates fault and remedy in error messages
_CUPY_FOR: dict[int | None, str] = {13: "cupy-cuda13x", 12: "cupy-cuda12x"}  # package by major version of CUDA
SAMPLES = 32  # size of the micro-batch for which a source lists algorithms
# Kinds of convolution, common in networks, for which every algorithm is examined.
KINDS = {
    "1×1": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 1, 1),
    "3×3": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, padding=(1, 1)),
    "3×3 stride 2": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, stride=(2, 2), padding=(1, 1)),
    "3×3 dilation 2": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, padding=(2, 2), dilation=(2, 2)),
    "3×3 depthwise": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, padding=(1, 1), groups=64),
    "5×5": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 5, 5, padding=(2, 2)),
}
_MOST_REASONS = 3  # the newest ones are shown


@click.command(cls=FileCommand)
def doctor() -> None:
    """Show what this machine has, and which algorithms are available on the CPU and on each kind of GPU."""
    from mucudnn.kernels.registry import algorithms
    from mucudnn.terminal.console import output

    console, headings = output(), ("algorithm", "computes", "not")
    found = (*machine(), *accelerators(), *packages())
    console.print(_table("Machine", ("", "this machine", "to get it"), found))
    console.print(_table("Algorithms on the CPU", headings, map(examine, algorithms())))
    for name, indices in gpus().items():
        console.print(_table(f"Algorithms on {name} ({_devices(indices)})", headings, on_gpu(indices[0])))


def machine() -> Iterator[Finding]:
    """Yield findings on the CPU and its load, PyTorch and its libraries, and the database."""
    from mucudnn.database.database import default_path
    from mucudnn.measuring.timing.load import watch_of
    from mucudnn.measuring.timing.processor_use import Processors
    from mucudnn.running.environment import current_environment

    here = current_environment()
    yield Finding("CPU", f"{here.device}, {os.cpu_count()} logical cores, PyTorch uses {here.capability}")
    yield cores(here.threads, Processors().allowed_cores())
    yield load(watch_of("cpu"))
    yield Finding("torch", here.torch)
    yield Finding("oneDNN", here.library)
    yield compiled()
    yield proving()
    yield from stored(default_path(), here)


def cores(threads: int, allowed: float) -> Finding:
    """Return a finding that compares PyTorch's number of threads with the number of cores that this process may use."""
    from mucudnn.measuring.timing.load import too_many_threads

    state = f"{threads}; this process may use {allowed:g} core{'' if allowed == 1 else 's'}"
    reason, _, remedy = (too_many_threads(threads, allowed) or "").partition(": ")
    return Finding("threads", f"{state}: {reason}" if reason else state, remedy)


def load(watch: Watch) -> Finding:
    """Return a finding on the load of the machine: other processes, and a quota.

    Measuring the load takes half a second.
    """
    mark = watch.mark()
    watch.pause()
    found = watch.since(mark)
    remedy = "" if found.is_quiet else "end other processes, or measure later"
    return Finding("load", str(found), remedy)


def stored(path: Path, here: Environment) -> Iterator[Finding]:
    """Yield findings on the database: path, number of times measured under load, and failed candidates."""
    from mucudnn.database.database import Database
    from mucudnn.words.errors import MucudnnError
    from mucudnn.words.results import is_busy

    rows: list[Row] = []
    with suppress(MucudnnError), Database(path, read_only=True, create=False) as database:
        rows = database.every_row(here)
    busy = sum(is_busy(row["load"]) for row in rows)
    failed = [row for row in rows if row["kind"] == "failure" and not row["passed_over"]]
    if busy:
        remedy = "tune when the machine is quiet: they are measured again"
        yield Finding("database", f"{path}: {busy} of its times were measured under load", remedy)
    else:
        yield Finding("database", str(path))
    if failed:
        reasons = "; ".join(list(dict.fromkeys(str(row["reason"]) for row in failed))[-_MOST_REASONS:])
        ways = f"{len(failed)} ways to compute a convolution: {reasons}"
        yield Finding("barred", ways, "mucudnn check tells of a model")


def proving() -> Finding:
    """Return a finding on the proving process for foreign code, and the checks that guard its heap."""
    from mucudnn.measuring.proving.prover import prover

    try:
        guards = prover().guards()
    except OSError as error:
        reason = (
            f"{_lacking(first_line(error))}; code of libraries is not tried, but PyTorch's own as the model runs it"
        )
        return Finding("proving process", reason, "let this process start others")
    return Finding("proving process", f"with {' and '.join(guards)}" if guards else "without checks of its heap")


def compiled() -> Finding:
    """Return a finding on the loaded build of mucudnn's own C++ code, or the reason why there is none."""
    from mucudnn.kernels.compiled.library import bfloat16_products, builds, largest_build, loaded_build

    build, largest = loaded_build(), largest_build()
    if build.library is not None:
        words = f"built for {', '.join(builds())}; {build.name} runs; bfloat16 is multiplied in {bfloat16_products()}"
        if build.name == largest or "MUCUDNN_BUILD" in os.environ:
            return Finding("compiled algorithms", words)
        advice = f"install mucudnn again on this machine, or with MUCUDNN_BUILDS={largest},{','.join(builds())}"
        return Finding("compiled algorithms", f"{words}, and this processor has {largest}", advice)
    return Finding(
        "compiled algorithms",
        _lacking(build.why_not_compiled) + "; only algorithms on PyTorch's operators run",
        "install g++, then: pip install --force-reinstall --no-deps mucudnn",
    )


def accelerators() -> Iterator[Finding]:
    """Yield findings on GPUs, the GPU driver, cuDNN and CuPy."""
    from mucudnn.kernels.cudnn.library import library
    from mucudnn.running.environment import require_cuda
    from mucudnn.words.errors import UnavailableError

    try:
        require_cuda()
        yield from _gpus_and_driver()
    except UnavailableError as error:
        yield _unavailable("GPU", error)
    try:
        yield Finding("cuDNN", f"{library().version_text}, {library().path}")
    except UnavailableError as error:
        yield _unavailable("cuDNN", error)
    yield cupy()


def packages() -> Iterator[Finding]:
    """Yield findings on installed packages that provide algorithms."""
    from mucudnn.kernels.registry import installed_plug_ins

    for plug_in in installed_plug_ins():
        if plug_in.error:
            yield Finding(plug_in.package, _lacking(plug_in.error), f"fix it, or pip uninstall {plug_in.name}")
        else:
            yield Finding(plug_in.package, f"brings {', '.join(plug_in.algorithms)}")


def _gpus_and_driver() -> Iterator[Finding]:
    import torch

    for name, indices in gpus().items():
        properties = torch.cuda.get_device_properties(indices[0])
        size, capability = format_bytes(properties.total_memory), f"sm{properties.major}{properties.minor}"
        yield Finding("GPU", f"{_devices(indices)}: {name}, {capability}, {size}")
    yield Finding("driver", driver())
    yield Finding("CUDA of PyTorch", str(torch.version.cuda))


def gpus() -> dict[str, list[int]]:
    """Return the indices of the GPUs that PyTorch can use, by device name."""
    import torch

    named: dict[str, list[int]] = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        named.setdefault(torch.cuda.get_device_name(index), []).append(index)
    return named


def driver() -> str:
    """Return the driver version that nvidia-smi reports."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    return told[0] if told else "unknown: nvidia-smi tells none"


def _devices(indices: list[int]) -> str:
    return ", ".join(f"cuda:{index}" for index in indices)


def _lacking(reason: str) -> str:
    return f"none: {reason}"


def _unavailable(name: str, error: UnavailableError) -> Finding:
    reason, *remedy = _REMEDY.split(str(error).removeprefix("device is 'cuda', but "), maxsplit=1)
    return Finding(name, _lacking(reason), *remedy)


def cupy() -> Finding:
    """Return a finding on CuPy after importing it, since an installed CuPy may fail for lack of system libraries."""
    from mucudnn.kernels.cuda.cupy_launcher import cuda_of_torch, how_to_install

    if find_spec("cupy") is None:
        return Finding("CuPy", _lacking("not installed"), how_to_install())
    distribution, installed = _installed_cupy()
    remedy = f"pip uninstall {distribution}, then {how_to_install()}"
    cuda = cuda_of_torch()
    if cuda in _CUPY_FOR and distribution in _CUPY_FOR.values() and distribution != _CUPY_FOR[cuda]:
        return Finding("CuPy", f"{installed}, and PyTorch is built for CUDA {cuda}", remedy)
    try:
        import_module("cupy")
    except Exception as error:  # loading libraries can fail in any way
        reason = first_line(error)
        return Finding("CuPy", f"{installed}, which cannot be imported: {reason}", f"fix what it needs, or {remedy}")
    return Finding("CuPy", installed)


def _installed_cupy() -> tuple[str, str]:
    """Return the name of CuPy's distribution, and a description of its version."""
    for distribution in (*_CUPY_FOR.values(), "cupy"):
        try:
            return distribution, f"{version(distribution)} ({distribution})"
        except PackageNotFoundError:
            continue
    return "cupy", "installed, version unknown"


def on_gpu(index: int) -> list[Finding]:
    """Return findings on the algorithms of a CUDA device, and on sources that offer algorithms, such as cuDNN."""
    import torch

    from mucudnn.kernels.registry import algorithms, sources
    from mucudnn.words.errors import MucudnnError

    with torch.cuda.device(index):
        findings = [examine(algorithm) for algorithm in algorithms("cuda")]
        try:
            return [*findings, *(examine_source(source) for source in sources("cuda"))]
        except MucudnnError as error:
            return [*findings, Finding("cudnn", "nothing", str(error))]


def examine_source(source: AlgorithmSource) -> Finding:
    """Return a finding on the number of algorithms that a source offers, by kind of convolution."""
    offered = {kind: len(source.offered(problem, [SAMPLES])) for kind, problem in KINDS.items()}
    computes = ", ".join(f"{kind} ({count} ways)" for kind, count in offered.items() if count)
    lacking = ", ".join(kind for kind, count in offered.items() if not count)
    return Finding(source.name, computes or "nothing", f"offers nothing for {lacking}" if lacking else "")


def examine(algorithm: Algorithm) -> Finding:
    """Return a finding on the kinds of convolution that an algorithm computes, with reasons against the others."""
    refusals = {kind: algorithm.supports(problem) for kind, problem in KINDS.items()}
    computes = ", ".join(kind for kind, refusal in refusals.items() if refusal is None)
    reasons = dict.fromkeys(refusal for refusal in refusals.values() if refusal is not None)
    return Finding(algorithm.name, computes or "nothing", "; ".join(reasons))


def _table(title: str, headings: tuple[str, str, str], findings: Iterable[Finding]) -> Table:
    from rich.table import Table

    table = Table(*headings, title=title, title_justify="left")
    for finding in findings:
        table.add_row(*finding)
    return table
