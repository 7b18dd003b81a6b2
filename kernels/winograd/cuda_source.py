"""Generates the CUDA C++ source of Winograd's transforms: the matrices, types and sizes, then winograd.cu."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from pathlib import Path

from mucudnn.kernels.winograd.cook_toom import CookToom, Matrix
from mucudnn.words.problem import MemoryFormat

_TYPES = {  # The types of storage and of arithmetic, by dtype.
    "float64": ("double", "double"),
    "float32": ("float", "float"),
    "bfloat16": ("BFloat16", "float"),
    "float16": ("Half", "float"),
}


@cache
def winograd_source(matrices: CookToom, dtype: str, memory_format: MemoryFormat, block_threads: int) -> str:
    """Return a CUDA C++ source without includes: ``extern "C"`` functions for blocks of ``block_threads`` threads.

    The matrices of the transforms are unrolled into sums that omit zero entries; each entry is rounded once.
    """
    held, computed = _TYPES[dtype]
    constants = {
        "bool CHANNELS_LAST": str(memory_format is MemoryFormat.CHANNELS_LAST).lower(),
        "int THREADS": block_threads,
        "int M": matrices.m,
        "int R": matrices.r,
        "int A": matrices.a,
    }
    named_matrices = {
        "B_T": matrices.b_t,
        "A_T": matrices.a_t,
        "DY": _transposed(matrices.a_t),
        "G": matrices.g,
        "TURNED_G": tuple(row[::-1] for row in matrices.g),
        "G_T": _transposed(matrices.g),
    }
    return "\n".join(
        [
            _text("scalars.cuh"),
            f"using T = {held};",
            f"using Real = {computed};",
            *(f"constexpr {name} = {value};" for name, value in constants.items()),
            *(_struct(name, matrix) for name, matrix in named_matrices.items()),
            _text("winograd.cu"),
        ]
    )


def _struct(name: str, matrix: Matrix) -> str:
    rows, columns = len(matrix), len(matrix[0])
    return "\n".join(
        [
            f"struct {name} {{",
            f"  static constexpr int ROWS = {rows}, COLUMNS = {columns};",
            f"  static __device__ __forceinline__ void apply(const Real (&in)[{columns}], Real (&out)[{rows}]) {{",
            *(f"    out[{i}] = {_sum(row)};" for i, row in enumerate(matrix)),
            "  }",
            "};",
        ]
    )


def _sum(row: tuple[Fraction, ...]) -> str:
    terms = (_term(factor, f"in[{j}]") for j, factor in enumerate(row) if factor)
    return " ".join(terms).removeprefix("+ ")


def _term(factor: Fraction, operand: str) -> str:
    sign = "-" if factor < 0 else "+"
    return f"{sign} {operand}" if abs(factor) == 1 else f"{sign} Real({float(abs(factor))!r}) * {operand}"


def _transposed(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="ascii")
