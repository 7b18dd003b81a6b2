"""A program: what the build that ``MUCUDNN_BUILD`` names computes, saved to the file that is its argument.

A build is chosen once in a process, so that each needs one of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, Pair
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.compiled import algorithms as compiled
from mucudnn.kernels.compiled.library import bfloat16_products, build_name, loaded_build
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.kernels.winograd import algorithms as winograd
from mucudnn.testing.checks import Call

HALF = ("bfloat16", "float16")
DTYPES = ("float32", *HALF)
CHANNELS = (1, 16)  # a window of planes, and one of vectors
_MICRO_BATCHES = (2, 1)
# Channels that are no multiple of any vector, below and above the longest; maps that are no multiple of any tile.
_GEOMETRIES: dict[str, dict[str, int]] = {
    "few": {"c": 3, "k": 5, "h": 10, "w": 13},
    "many": {"c": 35, "k": 21, "h": 9, "w": 7},
    "even": {"c": 54, "k": 22, "h": 7, "w": 9},
    "grouped": {"c": 8, "k": 10, "h": 7, "w": 8, "groups": 2},
    "depthwise": {"c": 19, "k": 19, "h": 13, "w": 37, "groups": 19},
}


@dataclass
class Results:
    """By case: the error against float64. By algorithm that cannot: the reason.

    ``unlike``: by case, how many products of half precision are not what torch makes of them.
    """

    build: str
    errors: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    unlike: dict[str, int] = field(default_factory=dict)


def compute() -> Results:
    torch.set_num_threads(1)  # the contract suite has more
    results = Results(build_name())
    if loaded_build().library is not None:
        results.unlike = {
            f"{dtype} {memory_format} {channels}": unlike_products(dtype, memory_format, channels)
            for dtype, memory_format, channels in product(HALF, MemoryFormat, CHANNELS)
        }
    for algorithm, case, problem in _cases():
        torch.manual_seed(1)
        call = Call(problem, sum(_MICRO_BATCHES))
        if reason := algorithm.supports(problem):
            results.reasons[algorithm.name] = reason
            continue
        expected = reference(problem, call.x, call.w, call.y)
        results.errors[case] = relative_l2_error(call.run(algorithm, _MICRO_BATCHES), expected)
    return results


def unlike_products(dtype: str, memory_format: MemoryFormat, channels: int) -> int:
    """Multiply all 2^16 values of a dtype with numbers that round in every way; count what torch rounds otherwise.

    A product of two such numbers is exact in float32 or rounded there once, so that only what is read and written
    differs. It is computed as a 1x1 convolution of one channel; further ones are zero.
    """
    of_dtype: torch.dtype = getattr(torch, dtype)
    numbers = torch.finfo(of_dtype)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(of_dtype)
    torch.manual_seed(0)
    chosen = [1.0, -1.0, 0.5, 0.75, 1 + numbers.eps, numbers.tiny, numbers.max, numbers.smallest_normal * numbers.eps]
    factors = torch.cat([torch.tensor(chosen), torch.randn(12), torch.inf * torch.ones(1)]).to(of_dtype)
    problem = ConvProblem(Operation.FORWARD, channels, 256, 256, len(factors), 1, 1, dtype=dtype)
    problem = replace(problem, memory_format=memory_format)
    call = Call(problem, 1)
    call.x.zero_()[0, -1] = every.view(256, 256)
    call.w.fill_(1)[:, -1] = factors.view(-1, 1, 1)
    computed = call.run(compiled.IMPLICIT_GEMM, [1])[0].flatten(1)
    flushes = dtype == "bfloat16" and channels > 1 and bfloat16_products() != "floats"
    smallest = numbers.tiny if flushes else 0.0  # of the numbers that the instruction for pairs does not flush
    every, factors = (values.where(~(values.abs() < smallest), 0) for values in (every, factors))
    expected = (every.float() * factors.float().view(-1, 1)).to(of_dtype)
    computed, expected = (values.where(~(values.abs() <= smallest), 0) for values in (computed, expected))
    return int(((computed != expected) & ~(computed.isnan() & expected.isnan())).sum())


def _cases() -> Iterator[tuple[Algorithm, str, ConvProblem]]:
    geometries = product(Operation, MemoryFormat, _GEOMETRIES)
    for (operation, memory_format, name), (algorithm, r, stride), dtype in product(geometries, _algorithms(), DTYPES):
        if not _takes(algorithm, name):
            continue
        problem = ConvProblem(
            operation,
            **_GEOMETRIES[name],
            r=r,
            s=r,
            stride=stride,
            padding=(r // 2, 1) if r > 1 else (0, 0),
            dtype=dtype,
            memory_format=memory_format,
        )
        yield algorithm, f"{algorithm.name} {operation} {memory_format} {name} {stride[0]} {dtype}", problem


def _takes(algorithm: Algorithm, name: str) -> bool:
    """Tell whether it is made for these channels, in any build."""
    if algorithm == compiled.POINTWISE:
        return name != "depthwise"
    if algorithm == compiled.DEPTHWISE:
        return "groups" in _GEOMETRIES[name]
    return True


def _algorithms() -> Iterator[tuple[Algorithm, int, Pair]]:
    """With the size and the stride of the filter."""
    yield from ((algorithm, algorithm.r, (algorithm.stride, algorithm.stride)) for algorithm in winograd.ALGORITHMS)
    yield from ((compiled.POINTWISE, 1, (stride, 1)) for stride in (1, 2))
    direct = (compiled.IMPLICIT_GEMM, compiled.DEPTHWISE, compiled.LOOP_NEST)
    yield from ((algorithm, 3, (2, 1)) for algorithm in direct)


if __name__ == "__main__":
    torch.save(vars(compute()), Path(sys.argv[1]))
