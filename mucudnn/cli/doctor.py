"""``mucudnn doctor``: what this machine has, which algorithms that gives, and how to get the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from mucudnn.problem import ConvProblem, Operation

if TYPE_CHECKING:
    from rich.table import Table

    from mucudnn.kernels.algorithm import Algorithm


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the machine has or lacks; ``remedy`` says how to get it, empty where nothing is amiss."""

    name: str
    state: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class AlgorithmFinding:
    """Kinds of convolution that an algorithm computes, and why not the others."""

    name: str
    computes: tuple[str, ...]
    reasons: tuple[str, ...]


# What is asked of every algorithm: the kinds of convolution that networks are made of.
KINDS = {
    "1×1": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 1, 1),
    "3×3": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, padding=(1, 1)),
    "3×3 stride 2": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, stride=(2, 2), padding=(1, 1)),
    "3×3 dilation 2": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, padding=(2, 2), dilation=(2, 2)),
    "3×3 depthwise": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, padding=(1, 1), groups=64),
    "5×5": ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 5, 5, padding=(2, 2)),
}


@click.command()
def doctor() -> None:
    """Say what this machine has, and which algorithms are available."""
    from mucudnn.bench.console import output
    from mucudnn.kernels.registry import algorithms

    console = output()
    console.print(machine_table([*machine(), *accelerators()]))
    console.print(algorithms_table([examine(algorithm) for algorithm in algorithms()]))


def machine() -> Iterator[Finding]:
    """What everything runs on."""
    from mucudnn.database.database import default_path
    from mucudnn.environment import current_environment

    here = current_environment()
    yield Finding("CPU", f"{here.device}, {os.cpu_count()} logical cores, torch uses {here.capability}")
    yield Finding("threads", str(here.threads))
    yield Finding("torch", here.torch)
    yield Finding("oneDNN", here.library)
    yield compiled()
    yield Finding("database", str(default_path()))


def compiled() -> Finding:
    """Mucudnn's own C++: which build is loaded, or why there is none."""
    from mucudnn.kernels.compiled.library import loaded_build

    build = loaded_build()
    if build.library is not None:
        return Finding("compiled algorithms", f"built for {build.name}")
    return Finding(
        "compiled algorithms",
        _lacking(build.why_not_compiled) + "; the same algorithms run on torch's operators, more slowly",
        "install g++, then: pip install --force-reinstall --no-deps mucudnn",
    )


def accelerators() -> Iterator[Finding]:
    """GPU, cuDNN and CuPy, which the CPU does without."""
    import torch

    if torch.cuda.is_available():
        yield Finding("GPU", torch.cuda.get_device_name())
        yield Finding("cuDNN", str(torch.backends.cudnn.version()))  # type: ignore[no-untyped-call]
    elif torch.version.cuda is None:
        reason, remedy = f"torch {torch.__version__} is built without CUDA", "install a CUDA build of torch"
        yield Finding("GPU", _lacking(reason), remedy)
        yield Finding("cuDNN", _lacking(reason), remedy)
    else:
        reason, remedy = "torch finds no GPU", "add an NVIDIA GPU, or mend its driver: see nvidia-smi"
        yield Finding("GPU", _lacking(reason), remedy)
        yield Finding("cuDNN", _lacking(reason), remedy)
    yield cupy()


def _lacking(reason: str) -> str:
    return f"none: {reason}"


def cupy() -> Finding:
    if find_spec("cupy") is None:
        return Finding("CuPy", _lacking("not installed"), "pip install 'mucudnn[cuda]'")
    for distribution in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return Finding("CuPy", version(distribution))
        except PackageNotFoundError:
            continue
    return Finding("CuPy", "installed, version unknown")


def examine(algorithm: Algorithm) -> AlgorithmFinding:
    """Ask an algorithm for every kind of convolution."""
    refusals = {kind: algorithm.supports(problem) for kind, problem in KINDS.items()}
    return AlgorithmFinding(
        algorithm.name,
        tuple(kind for kind, refusal in refusals.items() if refusal is None),
        tuple(dict.fromkeys(refusal for refusal in refusals.values() if refusal is not None)),
    )


def machine_table(findings: list[Finding]) -> Table:
    from rich.table import Table

    table = Table("", "this machine", "to get it", title="Machine", title_justify="left")
    for finding in findings:
        table.add_row(finding.name, finding.state, finding.remedy)
    return table


def algorithms_table(findings: list[AlgorithmFinding]) -> Table:
    from rich.table import Table

    table = Table("algorithm", "computes", "not", title="Algorithms on the CPU", title_justify="left")
    for finding in findings:
        table.add_row(finding.name, ", ".join(finding.computes) or "nothing", "; ".join(finding.reasons))
    return table
