"""A program: what the build that ``MUCUDNN_BUILD`` names computes, saved to the file that is its argument.

A build is chosen once in a process, so that each needs one of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from mucudnn.kernels.compiled import implicit_gemm, pointwise
from mucudnn.kernels.compiled.library import build_name
from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.winograd import algorithms as winograd
from mucudnn.testing.guarded_call import Call
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

_MICRO_BATCHES = (2, 1)
# Channels that are no multiple of any vector, below and above the longest; maps that are no multiple of any tile.
_GEOMETRIES: dict[str, dict[str, int]] = {
    "few": {"c": 3, "k": 5, "h": 10, "w": 13},
    "many": {"c": 35, "k": 21, "h": 9, "w": 7},
    "grouped": {"c": 8, "k": 10, "h": 7, "w": 8, "groups": 2},
}


@dataclass
class Results:
    """By case: what was computed, and its error against float64. By algorithm that cannot: the reason."""

    build: str
    outputs: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def compute() -> Results:
    torch.set_num_threads(1)  # the contract suite has more
    results = Results(build_name())
    for algorithm, case, problem in _cases():
        torch.manual_seed(1)
        call = Call(problem, sum(_MICRO_BATCHES))
        if reason := algorithm.supports(problem):
            results.reasons[algorithm.name] = reason
            continue
        expected = reference(problem, call.x, call.w, call.y)
        output = call.run(algorithm, _MICRO_BATCHES)
        results.outputs[case], results.errors[case] = output.clone(), relative_l2_error(output, expected)
    return results


def _cases() -> Iterator[tuple[Algorithm, str, ConvProblem]]:
    geometries = product(Operation, MemoryFormat, _GEOMETRIES)
    for (operation, memory_format, name), (algorithm, r, stride) in product(geometries, _algorithms()):
        problem = ConvProblem(
            operation,
            **_GEOMETRIES[name],
            r=r,
            s=r,
            stride=(stride, 1),
            padding=(r // 2, 1) if r > 1 else (0, 0),
            memory_format=memory_format,
        )
        yield algorithm, f"{algorithm.name} {operation} {memory_format} {name} {stride}", problem


def _algorithms() -> Iterator[tuple[Algorithm, int, int]]:
    """With the size and the vertical stride of the filter."""
    yield from ((algorithm, algorithm.r, 1) for algorithm in winograd.ALGORITHMS)
    yield from ((algorithm, 3, 2) for algorithm in implicit_gemm.ALGORITHMS)
    yield from ((algorithm, 1, stride) for algorithm in pointwise.ALGORITHMS for stride in (1, 2))


if __name__ == "__main__":
    torch.save(vars(compute()), Path(sys.argv[1]))
