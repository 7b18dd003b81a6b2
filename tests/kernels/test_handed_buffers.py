"""The algorithms of torch's operators stay within what they are handed, whatever that is: they raise where it is too
little. Torch resizes an ``out=`` that is too small, and would write behind a slice of a mini-batch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, Pair
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.memory import suggests_channels_last
from mucudnn.kernels.registry import algorithm
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.kernels.torch_ops.direct import Direct, phases
from mucudnn.kernels.winograd import algorithms as winograd
from mucudnn.testing.checks import Call
from mucudnn.testing.contract import ONE_OF_EACH_KIND, geometry

NAMES = ("gemm", "direct", "fft", "winograd-2x2", "winograd-4x4", "winograd-6x6")
HANDED = ("x", "w", "y", "prepared", "scratch")


@pytest.fixture(autouse=True)
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "why_not", lambda problem, name: "torch alone")


def problems(name: str, memory_format: MemoryFormat) -> Iterator[tuple[ConvProblem, int]]:
    for key in ONE_OF_EACH_KIND:
        for operation in Operation:
            for dtype in ("float32", "bfloat16"):
                problem, n, _ = geometry(key, operation, memory_format=memory_format, dtype=dtype)
                if algorithm(name).supports(problem) is None:
                    yield problem, n


def run(a: Algorithm, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, prepared: Tensor, scratch: Tensor) -> None:
    a.open(problem, w, prepared)
    a.step(problem, x, w, y, None, prepared, scratch)
    a.close(problem, w, prepared)


@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("handed", HANDED)
@pytest.mark.parametrize("name", NAMES)
def test_less_than_is_needed_raises_and_nothing_is_written_behind_it(
    name: str, handed: str, memory_format: MemoryFormat
) -> None:
    """One sample, one filter or one byte less than the problem, or the declaration, says."""
    a = algorithm(name)
    for problem, n in problems(name, memory_format):
        workspace, call = a.workspace(problem, n), Call(problem, n)
        given = {
            "x": call.x,
            "w": call.w,
            "y": call.y,
            "prepared": call.memory.buffer(workspace.prepared_bytes),
            "scratch": call.memory.buffer(workspace.scratch_bytes),
        }
        if given[handed].numel() == 0:
            continue
        last, given[handed] = given[handed][-1:], given[handed][:-1]
        kept = last.clone()
        with pytest.raises((RuntimeError, ValueError)):  # of torch, or ours
            run(a, problem, *given.values())
        assert call.memory.trespass() is None
        assert torch.equal(last.nan_to_num(7), kept.nan_to_num(7))


# The memory format that torch suggests for a tensor, told without its slow imports.


def test_it_is_torchs() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        shape = [rng.choice([1, 1, 2, 3, 4]) for _ in range(4)]
        tensor = torch.empty(shape, memory_format=rng.choice([torch.contiguous_format, torch.channels_last]))
        turned = tensor.transpose(rng.randrange(4), rng.randrange(4))
        tensor = rng.choice([tensor, turned, tensor[:, :1], tensor[..., ::2], tensor[:, :0]])
        assert suggests_channels_last(tensor) == (suggest_memory_format(tensor) == torch.channels_last), seed


# The phases of the direct method: which pixels a tap reads, for strides and dilations that share no factor or many.


by_operation = pytest.mark.parametrize("operation", list(Operation))


def error_of(problem: ConvProblem) -> float:
    call = Call(problem, 3)
    expected = reference(problem, call.x, call.w, call.y)
    return relative_l2_error(call.run(Direct(), [2, 1]), expected)


@by_operation
def test_a_map_that_no_tap_reaches(operation: Operation) -> None:
    """The only output reads padding alone: y is the bias, gradients are zero."""
    problem = ConvProblem(operation, 2, 1, 1, 3, 1, 1, stride=(3, 3), padding=(1, 1))
    assert not Call(problem, 2).run(Direct(), [2]).any()


@pytest.mark.parametrize(
    ("stride", "dilation", "count"),
    [((1, 1), (1, 1), 1), ((2, 2), (1, 1), 4), ((2, 2), (2, 2), 1), ((4, 4), (1, 1), 9)],
)
def test_only_phases_that_are_read_are_stored(stride: Pair, dilation: Pair, count: int) -> None:
    layout = phases(ConvProblem(Operation.FORWARD, 2, 16, 16, 2, 3, 3, stride, (1, 1), dilation))
    assert len(layout.offsets) == count
    assert {phase for phase, _ in layout.taps} == set(range(count))
