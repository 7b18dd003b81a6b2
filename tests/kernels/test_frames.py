"""The passes of ``frames``: each pair of a tap and a frame that it reads is in exactly one of them."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support import compiled

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.frames import depth_of, passes
from mucudnn.kernels.registry import algorithm


def problems(operation: Operation) -> list[ConvProblem]:
    found = []
    for d, t, stride, padding, dilation in product((1, 2, 5, 6), (1, 2, 3), (1, 2, 3), (0, 1, 4), (1, 2)):
        steps = (stride, 1, 1), (padding, 0, 0), (dilation, 1, 1)
        try:
            found.append(ConvProblem(operation, 2, 4, 4, 3, 3, 3, *steps, d=d, t=t))
        except InvalidInputError:  # the filter is longer than the padded clip
            continue
    return found


@pytest.mark.parametrize("operation", Operation)
def test_passes_are_the_definition(operation: Operation) -> None:
    for problem in problems(operation):
        stride, padding, dilation = problem.stride[0], problem.padding[0], problem.dilation[0]
        reads = {
            (t, o, o * stride - padding + t * dilation)
            for t, o in product(range(problem.t), range(problem.positions[0]))
        }
        expected = sorted((t, o, d) for t, o, d in reads if 0 <= d < problem.d)
        found, written = [], set[int]()
        for each in passes(problem, depth_of(problem)):
            frames = [*zip(range(each.y.start, each.y.stop), range(each.x.start, each.x.stop), strict=True)]
            assert len(frames) == each.count
            found += [(each.tap, o, d) for o, d in frames]
            if operation is not Operation.BACKWARD_FILTER:
                targets = {o if operation is Operation.FORWARD else d for o, d in frames}
                assert targets.isdisjoint(written) if each.is_first else targets <= written
                written |= targets
        assert sorted(found) == expected, problem


def test_of_a_clip_of_one_frame_one_slice_of_the_filter_is_read() -> None:
    """Symmetric padding, and the causal one that a model adds itself, where only the last frame is no padding."""
    for d, padding in ((1, 1), (1, 2)):
        problem = ConvProblem("forward", 2, 8, 8, 3, 3, 3, padding=(padding, 1, 1), d=d, t=3)
        for each in passes(problem, depth_of(problem)):
            assert (each.x, each.count) == (slice(0, 1), 1)
    one = ConvProblem("forward", 2, 8, 8, 3, 3, 3, padding=1, d=1, t=3)
    assert [each.tap for each in passes(one, depth_of(one))] == [1]
    x, w, y = torch.randn(2, 2, 1, 8, 8), torch.full((3, 2, 3, 3, 3), torch.nan), torch.empty(2, 3, 1, 8, 8)
    w[:, :, 1] = torch.randn(3, 2, 3, 3)
    compiled.algorithm("implicit-gemm")  # or this build has none
    frames = algorithm("frames-implicit-gemm")
    workspace = frames.workspace(one, 2)
    prepared, scratch = (torch.empty(n, dtype=torch.uint8) for n in (workspace.prepared_bytes, workspace.scratch_bytes))
    frames.open(one, w, prepared)
    frames.step(one, x, w, y, None, prepared, scratch)
    exact = torch.conv2d(x[:, :, 0].double(), w[:, :, 1].double(), padding=1)
    torch.testing.assert_close(y[:, :, 0].double(), exact, rtol=1e-4, atol=1e-4)
