"""``mucudnn.Conv1d`` beside torch's, over all its arguments. Nothing is measured here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.problems.tuned_by_hand import assert_exact, ran, tune_by_hand
from torch import nn

import mucudnn
from mucudnn.words.problem import Operation

# torch says it once a process, and of its own convolution
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
EVERY = set(Operation)


def pair(*args: Any, x: torch.Tensor, algorithm: str = "gemm", **options: Any) -> tuple[nn.Module, Any]:
    """Torch's module and ours with the same parameters, tuned for x."""
    torchs = nn.Conv1d(*args, **options).to(x.dtype)
    ours = tune_by_hand(copy.deepcopy(torchs), x, algorithm)
    assert type(ours) is mucudnn.Conv1d
    return torchs, ours


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 2, "stride": 2, "dilation": 2, "bias": False},
        {"groups": 2},
        {"kernel_size": 1},
        *({"padding": 2, "padding_mode": mode} for mode in ("reflect", "replicate", "circular")),
        {"padding": "valid"},
        *({"padding": "same", "kernel_size": size} for size in (3, 2, 4)),
        {"padding": "same", "kernel_size": 2, "dilation": 3},
        {"padding": "same", "kernel_size": 2, "padding_mode": "reflect"},
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [9, 17])
def test_results_and_gradients_of_any_order(options: dict[str, Any], length: int) -> None:
    x = torch.randn(3, 4, length)
    torchs, ours = pair(4, 6, x=x, **{"kernel_size": 3} | options)
    assert_exact(ours, torchs, x)
    assert ran(ours) == EVERY


@pytest.mark.parametrize("algorithm", ["direct", "implicit-gemm", "fft"])
def test_other_algorithms(algorithm: str) -> None:
    x = torch.randn(2, 8, 20)
    torchs, ours = pair(8, 8, 5, padding=2, x=x, algorithm=algorithm)
    assert_exact(ours, torchs, x, 1e-4)
    assert Operation.FORWARD in ran(ours)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 9),
        torch.randn(1, 4, 9),
        torch.randn(3, 9, 4).transpose(1, 2),  # as of sequences with their channels last
        torch.randn(4, 3, 18).transpose(0, 1)[..., ::2],
        torch.randn(3, 4, 9).as_strided((3, 4, 9), (36, 1, 4)),
    ],
    ids=["unbatched", "one", "channels last", "strided", "as strided"],
)
def test_inputs_of_any_layout(x: torch.Tensor) -> None:
    torchs, ours = pair(4, 6, 3, x=x)
    assert_exact(ours, torchs, x)
    assert ran(ours) == EVERY
