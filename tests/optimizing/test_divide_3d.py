"""Micro-batches of ``nn.Conv3d``: the largest within the limit, by bytes that are counted; no time is looked at."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any, cast

import pytest
import torch
from support.problems.tuned_by_hand import assert_exact
from torch import Tensor, nn

import mucudnn
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.modules.conv3d import UNDIVIDED, DividedOperation
from mucudnn.optimizing.divide_3d import divide_3d
from mucudnn.words.config import Config
from mucudnn.words.problem import Operation

X = torch.randn(7, 4, 6, 6, 6, dtype=torch.float64)
MATRIX_BYTES = 8 * 4 * 27 * 6**3  # im2col of one sample, which torch takes of the whole batch in float64


class Twice(nn.Module):
    """Its inner convolution needs a gradient of its input, is called with two batch sizes, and pads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Conv3d(4, 4, 3, padding=1)
        self.inner = nn.Conv3d(4, 2, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(x)
        return self.inner(y[:3]).sum() + self.inner(y)  # type: ignore[no-any-return]


def chosen(divided: tuple[DividedOperation, ...]) -> dict[Operation, DividedOperation]:
    return {one.operation: one for one in divided}


def test_the_largest_micro_batch_within_the_limit() -> None:
    limit = 3 * MATRIX_BYTES + MATRIX_BYTES // 2  # three matrices, and the result of a slice, but not four
    divided = divide_3d(Twice().double(), X, Config(workspace_limit=limit), "cpu")
    assert set(divided) == {"outer", "inner"}
    assert {one.x_shape for one in divided["inner"]} == {(7, 4, 8, 8, 8)}  # the larger batch, with its padding
    assert set(chosen(divided["outer"])) == {Operation.FORWARD, Operation.BACKWARD_FILTER}  # nobody asks for its dx
    for one in divided["outer"]:
        assert one.micro_batch_size == 2  # of divisors of seven and powers of two
        assert one.divided_bytes <= limit < 7 * MATRIX_BYTES <= one.undivided_bytes


@pytest.mark.parametrize(("matrices", "size"), [(2, 1), (3, 2), (5, 4)])
def test_what_it_says_is_what_a_call_allocates(matrices: int, size: int) -> None:
    model = nn.Conv3d(4, 4, 3, padding=1).double()
    ours: Any = mucudnn.optimize(copy.deepcopy(model), X, Config(workspace_limit=matrices * MATRIX_BYTES))
    of = chosen(ours.divided)
    assert of[Operation.FORWARD].micro_batch_size == size
    with torch.no_grad():
        for module, expected in ((ours, of[Operation.FORWARD].divided_bytes), (model, 7 * MATRIX_BYTES)):
            y = module(X)
            assert peak_allocated_bytes(partial(module, X)) - y.nbytes == expected


def test_results_and_gradients_are_those_of_torch() -> None:
    model = Twice().double()
    ours = mucudnn.optimize(copy.deepcopy(model), X, Config(workspace_limit=2 * MATRIX_BYTES))
    assert all(one.micro_batch_size == 1 for m in (ours.outer, ours.inner) for one in cast(Any, m).divided)
    assert_exact(ours, model, X, 1e-12)


def test_what_is_within_the_limit_stays_undivided() -> None:
    ours: Any = mucudnn.optimize(nn.Conv3d(4, 4, 3, padding=1).double(), X, Config())
    assert {one.micro_batch_size for one in ours.divided} == {UNDIVIDED}
    assert mucudnn.report(ours).untuned == (("", "within the limit of 64 MiB"),)
    for options in ({"workspace_limit": None}, {"workspace_limit": "headroom"}, {"workspace_budget": "1MiB"}):
        model = mucudnn.optimize(nn.Conv3d(4, 4, 3).double(), X, Config(**options))  # type: ignore[arg-type]
        assert type(model) is nn.Conv3d
        assert "no workspace limit in bytes" in mucudnn.report(model).untuned[0][1]


def test_a_limit_below_one_sample_is_said_and_torchs_own_runs() -> None:
    model = nn.Conv3d(4, 4, 3, padding=1).double()
    config = Config(workspace_limit="1KiB", operations=(Operation.FORWARD,))
    with pytest.warns(UserWarning, match=r"the model itself: forward of 7 samples needs .* above the limit of 1 KiB"):
        ours: Any = mucudnn.optimize(copy.deepcopy(model), X, config)
    assert torch.equal(ours(X), model(X))
    ((_, reason),) = mucudnn.report(ours).untuned
    assert "in micro-batches, above the limit of 1 KiB" in reason


@pytest.mark.parametrize("torch_format", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_libraries_copies_count_too(dtype: torch.dtype, torch_format: torch.memory_format) -> None:
    """Torch copies contiguous operands of oneDNN into a format of its own, and takes much less in channels_last."""
    x = torch.randn(8, 4, 8, 8, 8, dtype=dtype).to(memory_format=torch_format)
    model = nn.Conv3d(4, 8, 3, padding=1).to(dtype)
    with torch.no_grad():
        inside = peak_allocated_bytes(lambda: model(x)) - model(x).nbytes
    (undivided,) = divide_3d(model, x, Config(operations=(Operation.FORWARD,)), "cpu")[""]
    assert undivided.undivided_bytes == inside
    if torch_format == torch.contiguous_format:
        (divided,) = divide_3d(model, x, Config(workspace_limit=inside - 1, operations=(Operation.FORWARD,)), "cpu")[""]
        assert 0 < divided.micro_batch_size < 8
        assert divided.divided_bytes < inside


class OwnForward(nn.Conv3d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_the_report_says_what_was_chosen_and_what_was_left_alone() -> None:
    model = nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), OwnForward(4, 4, 3)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = mucudnn.optimize(model, X, Config(workspace_limit=5 * MATRIX_BYTES, operations=(Operation.FORWARD,)))
    report = mucudnn.report(ours)
    lines = " ".join(str(report).split())
    assert "in micro-batches, 0: forward 4 of 7 samples at a time; at most" in lines
    assert "PyTorch's own in 1: OwnForward has a forward of its own" in lines
    assert "0: forward 7x4x6x6x6: 4 of 7 samples at a time" in report.details()
    assert "in micro-batches, 0" in report._repr_html_()
