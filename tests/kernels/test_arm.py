"""The compiled algorithms on ARM (aarch64, NEON): cross-compiled, and run on an emulated processor.

Debian's packages for it: g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from support.places import TESTS

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.problem import MemoryFormat, Operation

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]

COMPILED = TESTS.parent / "kernels" / "compiled"
SOURCES = (*sorted(COMPILED.rglob("*.cpp")), TESTS / "kernels" / "arm_algorithms.cpp")
FLAGS = ("-std=c++17", "-O1", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", f"-I{COMPILED}")
FAMILIES = ("winograd", "implicit-gemm", "pointwise", "depthwise", "loop-nest")
LARGEST_ERROR = DEFAULT_MAX_RELATIVE_ERROR | {"float32": 1e-5}


def _compiled(source: Path, folder: Path) -> Path:
    target = folder / f"{source.parent.name}_{source.stem}.o"
    subprocess.run([COMPILER, *FLAGS, "-c", source, "-o", target], check=True)
    return target


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What the program says of each case: an error, or a number of mistakes."""
    folder = tmp_path_factory.mktemp("arm")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(_compiled, SOURCES, [folder] * len(SOURCES)))
    program = folder / "program"
    # Static, so that the emulated processor needs no libraries of its own.
    subprocess.run([COMPILER, "-static", "-fopenmp", *objects, "-o", program], check=True, stderr=subprocess.DEVNULL)
    said = subprocess.run([EMULATOR, program], check=True, capture_output=True, text=True).stdout
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in said.splitlines())}


def test_vectors_are_those_of_neon(lines: dict[str, float]) -> None:
    assert lines["vector length"] == 4


def test_the_register_tile_computes_a_product(lines: dict[str, float]) -> None:
    assert lines["matmul float32"] == 0  # of eighths, whose sums are exact


def test_halves_are_widened_and_rounded(lines: dict[str, float]) -> None:
    assert {name: mistakes for name, mistakes in lines.items() if name.startswith("halves")} == {
        "halves bfloat16": 0,
        "halves float16": 0,
    }


def test_every_algorithm_computes_the_convolution(lines: dict[str, float]) -> None:
    errors = {case: error for case, error in lines.items() if case.startswith(FAMILIES)}
    assert {case: error for case, error in errors.items() if not error <= LARGEST_ERROR[case.split()[-1]]} == {}
    dtypes = ("float32", "bfloat16", "float16")
    for family in FAMILIES:
        run = {" ".join(case.split()[1:]) for case in errors if case.startswith(family)}
        assert {" ".join(of) for of in product(Operation, MemoryFormat, dtypes)} == run
