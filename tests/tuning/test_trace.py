"""Problems of one-dimensional and transposed convolutions; those of ``nn.Conv2d`` are in ``tests/bench``."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.running.problems import problem_of_call
from mucudnn.tuning.trace import trace

FORWARD, BACKWARD_DATA, BACKWARD_FILTER = Operation
CHANNELS_LAST = MemoryFormat.CHANNELS_LAST


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_one_dimension_is_height_1() -> None:
    strided = {"stride": 2, "padding": 1, "dilation": 3, "groups": 2}
    cases: tuple[tuple[dict[str, Any], ConvProblem], ...] = (
        ({}, ConvProblem(FORWARD, 4, 1, 9, 6, 1, 3)),
        (strided, ConvProblem(FORWARD, 4, 1, 9, 6, 1, 3, (1, 2), (0, 1), (1, 3), 2)),
        ({"padding": "same"}, ConvProblem(FORWARD, 4, 1, 9, 6, 1, 3, padding=(0, 1))),
        # One on the left, one on the right, and one more there that torch adds beforehand
        ({"padding": "same", "kernel_size": 4}, ConvProblem(FORWARD, 4, 1, 10, 6, 1, 4, padding=(0, 1))),
        ({"padding": 2, "padding_mode": "reflect"}, ConvProblem(FORWARD, 4, 1, 13, 6, 1, 3)),
    )
    for options, expected in cases:
        model = nn.Conv1d(4, 6, **{"kernel_size": 3} | options)
        for x in (torch.randn(5, 4, 9), torch.randn(4, 9)):
            (call,) = trace(model, x)
            assert (call.problem, call.batch_size) == (expected, 5 if x.dim() == 3 else 1)
            assert expected.y_shape(1)[1:] == (6, 1, model(x).shape[-1])


def test_a_transposed_convolution_returns_the_x_of_its_problem() -> None:
    strided = {"stride": (2, 3), "padding": 1, "output_padding": (1, 2), "groups": 2}
    cases: tuple[tuple[dict[str, Any], ConvProblem], ...] = (
        ({}, ConvProblem(BACKWARD_DATA, 6, 11, 10, 4, 3, 3)),
        (strided, ConvProblem(BACKWARD_DATA, 6, 18, 24, 4, 3, 3, (2, 3), (1, 1), (1, 1), 2)),
        ({"dilation": (2, 1)}, ConvProblem(BACKWARD_DATA, 6, 13, 10, 4, 3, 3, dilation=(2, 1))),
    )
    for options, expected in cases:
        model, x = nn.ConvTranspose2d(4, 6, 3, **options), torch.randn(5, 4, 9, 8)
        (call,) = trace(model, x)
        assert call.is_transposed
        assert (call.problem, call.batch_size) == (expected, 5)
        assert (expected.x_shape(5), expected.y_shape(5)) == (model(x).shape, x.shape)
        assert expected.w_shape() == model.weight.shape
        problems = [call.problem_of(operation).operation for operation in Operation]
        assert problems == [BACKWARD_DATA, FORWARD, BACKWARD_FILTER]


def test_output_size_is_the_height_and_width_of_the_problem() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 6, 3, stride=2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.up(x, [12, 11]) if len(x) > 1 else self.up(input=x[0], output_size=(6, 12, 11))

    for n in (2, 1):
        (call,) = trace(Sized(), torch.randn(n, 4, 5, 5))
        assert call.problem.x_shape(n) == (n, 6, 12, 11)


def test_memory_format_and_dtype() -> None:
    model, x = nn.ConvTranspose2d(4, 6, 3), torch.randn(2, 4, 5, 5)
    (call,) = trace(model, x.to(memory_format=torch.channels_last))
    assert call.problem.memory_format is CHANNELS_LAST
    with torch.autocast("cpu", torch.bfloat16):
        (call,) = trace(model, x)
    assert call.problem.dtype == "bfloat16"


def test_bad_input_gets_torchs_error() -> None:
    for model, shape in product((nn.Conv1d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3)), ((4,), (2, 3, 4, 5, 6))):
        with pytest.raises(RuntimeError, match="Expected"):
            trace(model, torch.randn(shape))


def test_subclasses_may_take_other_arguments() -> None:
    class Skipping(nn.ConvTranspose2d):
        def forward(self, x: torch.Tensor, skip: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x) + skip

    assert trace(Skipping(4, 6, 3), (torch.randn(2, 4, 5, 5), torch.zeros(()))) == []


def test_volumes_are_traced_in_the_format_in_which_torch_computes_them() -> None:
    """Torch computes small channels_last volumes as contiguous, and large ones as they are."""
    found = set()
    for n, size, dtype in (
        (1, 3, torch.float32),
        (1, 40, torch.float32),
        (8, 12, torch.float32),
        (2, 20, torch.float64),
    ):
        layer = nn.Conv3d(4, 4, 3, padding=1, dtype=dtype).to(memory_format=torch.channels_last_3d)
        x = torch.randn(n, 4, size, size, size, dtype=dtype).contiguous(memory_format=torch.channels_last_3d)
        (call,) = trace(layer, x)
        geometry = layer.stride, layer.padding, layer.dilation, layer.groups
        assert call.problem == problem_of_call(x, layer.weight, *geometry)
        found.add(call.problem.memory_format)
    assert found == set(MemoryFormat)
