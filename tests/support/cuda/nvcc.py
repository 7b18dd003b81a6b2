"""Compiles Winograd's CUDA C++ with nvcc, which needs no GPU, and reads what ptxas says of registers and spills.

``PYTHONPATH=.:tests python -m support.cuda.nvcc`` compiles every source for every architecture, and prints a table.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from os import cpu_count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mucudnn.kernels.cuda.cupy_launcher import OPTIONS
from mucudnn.kernels.winograd.cook_toom import cook_toom
from mucudnn.kernels.winograd.cuda_backend import BLOCK_THREADS
from mucudnn.kernels.winograd.cuda_source import winograd_source
from mucudnn.words.problem import MemoryFormat

NVCC = shutil.which("nvcc")
ARCHITECTURES = (75, 80, 90, 100, 120)
_TOLD = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_(\d+)'"
    r".*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


class Source(NamedTuple):
    """What ``winograd_source`` writes a translation unit for: F(m, r), dtype and memory format."""

    m: int
    r: int
    dtype: str
    memory_format: MemoryFormat

    def __str__(self) -> str:
        return f"F({self.m}, {self.r}) {self.dtype} {self.memory_format}"


SOURCES = [
    Source(m, r, dtype, memory_format)
    for (m, r), dtype, memory_format in product(
        [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5)], ("float64", "float32", "bfloat16", "float16"), MemoryFormat
    )
]


class Function(NamedTuple):
    """A compiled function. spilled_bytes: the larger of its spill stores and loads, per thread."""

    name: str
    architecture: int
    registers: int
    spilled_bytes: int


def known_architectures() -> list[int]:
    """Those of ``ARCHITECTURES`` that this nvcc compiles for."""
    assert NVCC is not None
    told = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return [architecture for architecture in ARCHITECTURES if f"sm_{architecture}" in told.split()]


def compiled(source: Source, architectures: Iterable[int]) -> list[Function]:
    """Every function of a source for each architecture. Raises ``AssertionError`` with nvcc's words if it fails."""
    assert NVCC is not None
    m, r, dtype, memory_format = source
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    with TemporaryDirectory() as folder:
        path = Path(folder, "winograd.cu")
        path.write_text(winograd_source(cook_toom(m, r), dtype, memory_format, BLOCK_THREADS))
        command = [NVCC, "-fatbin", *OPTIONS, *targets, "-Werror=all-warnings", "-Xptxas=-v", path]
        told = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert told.returncode == 0, f"{source}: {told.stderr}"
    return [
        Function(name, int(architecture), int(registers), max(int(stores), int(loads)))
        for name, architecture, stores, loads, registers in _TOLD.findall(told.stderr)
    ]


def all_compiled(targets: Sequence[tuple[Source, Sequence[int]]]) -> dict[Source, list[Function]]:
    """Each source for its architectures, as many at a time as there are cores."""
    with ThreadPoolExecutor(cpu_count()) as threads:
        functions = threads.map(compiled, *zip(*targets, strict=True))
        return {source: found for (source, _), found in zip(targets, functions, strict=True)}


def table(found: dict[Source, list[Function]], architectures: Sequence[int]) -> str:
    """In Markdown, the most registers of each source's functions, and the bytes that any of them spills."""
    lines = [
        "| source | " + " | ".join(f"sm_{architecture}" for architecture in architectures) + " |",
        "|---" * (1 + len(architectures)) + "|",
    ]
    for source, functions in found.items():
        cells = []
        for architecture in architectures:
            these = [function for function in functions if function.architecture == architecture]
            spilled = max(function.spilled_bytes for function in these)
            cells.append(f"{max(f.registers for f in these)}" + (f", {spilled} bytes spilled" if spilled else ""))
        lines.append(f"| {source} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if NVCC is None:
        sys.exit("there is no nvcc on PATH")
    known = known_architectures()
    sys.stdout.write(table(all_compiled([(source, known) for source in SOURCES]), known) + "\n")
