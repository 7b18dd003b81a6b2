"""The contract suite of other packages' algorithms: what is right passes, and each broken promise is found and said."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from support.plug_in import Doubling, Pointwise
from torch import Tensor

from mucudnn import BaseAlgorithm, ConvProblem, Workspace
from mucudnn.core.problem import Operation
from mucudnn.kernels.torch_convolution import reference
from mucudnn.testing import check_algorithm
from mucudnn.testing.checks import Call


@dataclass(frozen=True)
class Exact(BaseAlgorithm):
    """Right, in 1x1 filters of every dtype; subclasses break one promise each."""

    name: str = "test/exact"
    version: int = 1
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return None if (problem.r, problem.s) == (1, 1) else "only 1x1 filters are offered"

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        sums = problem.operation is Operation.BACKWARD_FILTER
        return Workspace(prepared_bytes=8 * problem.k * problem.c // problem.groups * sums)

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        prepared.zero_()

    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, *rest: Tensor) -> None:
        result = reference(problem, x, w, y, bias)
        match problem.operation:
            case Operation.FORWARD:
                y.copy_(result)
            case Operation.BACKWARD_DATA:
                x.copy_(result)
            case Operation.BACKWARD_FILTER:
                rest[0].view(torch.float64).view(w.shape).add_(result)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            w.add_(prepared.view(torch.float64).view(w.shape))


class WritesBehind(Exact):
    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        return Workspace(super().workspace(problem, micro_batch_size).prepared_bytes, 64)

    def step(self, problem: ConvProblem, *tensors: Tensor | None) -> None:  # type: ignore[override]
        super().step(problem, *tensors)  # type: ignore[arg-type]
        scratch = tensors[-1]
        assert scratch is not None
        scratch.as_strided((1,), (1,), scratch.storage_offset() + 70).fill_(1)


class ChangesItsInput(Exact):
    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: Any) -> None:
        super().step(problem, x, w, y, *rest)
        (x if problem.operation is Operation.FORWARD else y)[0, 0, 0, 0] = 7.0


class DeclaresNothing(Exact):
    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0


class AllocatesToTellItsWorkspace(Exact):
    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        torch.empty(1000)
        return super().workspace(problem, micro_batch_size)


class SaysNoInAWord(Exact):
    def supports(self, problem: ConvProblem) -> str | None:
        return "no" if super().supports(problem) else None


class HidesNan(Exact):
    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: Any) -> None:
        super().step(problem, x, w, y, *rest)
        if problem.operation is Operation.FORWARD:
            y.nan_to_num_()


class SpreadsNan(Exact):
    def is_local(self, problem: ConvProblem) -> bool:
        return True

    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: Any) -> None:
        super().step(problem, x, w, y, *rest)
        if problem.operation is Operation.FORWARD:
            y.add_(0 * x.sum())


_calls = count()


class RollsDice(Exact):
    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: Any) -> None:
        super().step(problem, x, w, y, *rest)
        if problem.operation is Operation.FORWARD and problem.dtype == "float32":
            y.mul_(1 + 1e-6 * (next(_calls) % 5))


class Overwrites(Exact):
    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            w.copy_(prepared.view(torch.float64).view(w.shape))


class SumsInHalfPrecision(Exact):
    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: Any) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            w.add_(reference(problem, x, w, y))
        else:
            super().step(problem, x, w, y, *rest)


class ForgetsTheBias(Exact):
    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, *rest: Any) -> None:
        super().step(problem, x, w, y, None, *rest)


class Raises(Exact):
    def step(self, problem: ConvProblem, *_: Any) -> None:
        raise KeyError("missing")


class SupportsNothing(Exact):
    def supports(self, problem: ConvProblem) -> str | None:
        return "nothing at all is offered"


class MadeForOneSize(Exact):
    def supports(self, problem: ConvProblem) -> str | None:
        return None if problem.c == 384 else "only 384 channels are offered"


BROKEN = [
    (
        Doubling(),
        r"test/doubling: forward 7x5x6 -> 9, 1x1, .*, micro-batches 2 \+ 1, seed 0: the result has a relative "
        r"L2 error of 1\.00e\+00; allowed is at most 1e-05",
    ),
    (WritesBehind(), "written outside the output, prepared or scratch: 1 bytes, up to 7 bytes behind the end"),
    (ChangesItsInput(), "an input was changed"),
    (DeclaresNothing(), "allocated [0-9]+ bytes more than internal_bytes declares"),
    (AllocatesToTellItsWorkspace(), r"workspace\(\) allocated 4000 bytes; it must allocate nothing"),
    (SaysNoInAWord(), "the reason why not is 'no'; it must be a sentence"),
    (HidesNan(), "results are finite that depend on a NaN or an infinity in x; none may be"),
    (SpreadsNan(), "results are NaN, infinite or finite unlike torch's own where x has a NaN"),
    (RollsDice(), "run 2 gives other bits than the first, and deterministic is True"),
    (Overwrites(), "dw, added to 3 in every element, has a relative L2 error"),
    (SumsInHalfPrecision(), "the sum of 128 equal slices has a relative L2 error|the result has a relative L2 error"),
    (ForgetsTheBias(), "the result has a relative L2 error"),
    (Raises(), "micro-batches 2 \\+ 1, seed 0: it raised KeyError: 'missing'"),
    (SupportsNothing(), "test/exact: it supports no problem of the suite; give some in problems"),
    (MadeForOneSize(), "it supports no problem of the suite"),
    (Exact(name="exact"), "name of an algorithm is 'exact'; write 'package/name'"),
    (Exact, "algorithm is the class Exact"),
]


@pytest.mark.parametrize(("algorithm", "expected"), BROKEN, ids=lambda value: type(value).__name__)
def test_each_broken_promise_is_found_and_said(algorithm: Any, expected: str) -> None:
    with pytest.raises(AssertionError, match=expected):
        check_algorithm(algorithm, random_problems=0)


@pytest.mark.parametrize("algorithm", [Pointwise(), Exact()], ids=["pointwise", "exact"])
def test_what_keeps_its_promises_passes(algorithm: BaseAlgorithm) -> None:
    torch.manual_seed(3)
    expected = torch.randn(3)
    torch.manual_seed(3)
    torch.set_num_threads(2)
    told: list[str] = []
    passed = check_algorithm(algorithm, random_problems=20, report=told.append)  # type: ignore[arg-type]
    assert passed > 10
    (summary,) = told
    assert summary.startswith(f"{algorithm.name}: {passed} checks passed: ")
    problems, formats, dtypes, cuts = (int(n) for n in re.findall(r"(?<=[ (])\d+(?= (?:prob|mem|dty|cuts))", summary))
    assert (formats, dtypes) == ((2, 4) if isinstance(algorithm, Exact) else (1, 1))
    assert 3 * formats * dtypes <= problems <= cuts  # at least one for each format, dtype and operation
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.randn(3), expected)  # the caller's random numbers go on where they were


def test_a_problem_of_ones_own_is_checked_too() -> None:
    problem = ConvProblem(Operation.FORWARD, 384, 4, 4, 8, 1, 1)
    assert check_algorithm(MadeForOneSize(), problems=[problem], random_problems=0) >= 5  # type: ignore[arg-type]


def test_a_looser_bound_is_for_one_dtype() -> None:
    class SlightlyOff(Exact):
        def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: Any) -> None:
            super().step(problem, x, w, y, *rest)
            if problem.dtype == "float32" and problem.operation is Operation.FORWARD:
                y.mul_(1 + 5e-5)

    with pytest.raises(AssertionError, match="allowed is at most 1e-05"):
        check_algorithm(SlightlyOff(), random_problems=0)  # type: ignore[arg-type]
    check_algorithm(SlightlyOff(), random_problems=0, max_relative_error={"float32": 1e-4})  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[float] = []
    made = Call.__post_init__

    def recorded(call: Call) -> None:
        made(call)
        sums.append(float(call.w.double().sum()))

    check_algorithm(Pointwise(), random_problems=0)  # type: ignore[arg-type]  # torch's own results are kept
    monkeypatch.setattr(Call, "__post_init__", recorded)
    for seed in (1, 1, 2):
        check_algorithm(Pointwise(), random_problems=0, seed=seed)  # type: ignore[arg-type]
    third = len(sums) // 3
    one, again, other = (sums[i * third : (i + 1) * third] for i in range(3))
    assert one == pytest.approx(again, nan_ok=True)
    assert one != pytest.approx(other, nan_ok=True)
