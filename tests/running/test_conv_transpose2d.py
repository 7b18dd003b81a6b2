"""``mucudnn.ConvTranspose2d``: rules of its own beside those of every kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.problems.tuned_by_hand import assert_exact, ran, tune_by_hand
from torch import Tensor, nn

import mucudnn
from mucudnn.core.problem import Operation
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.tuning.trace import trace

# torch says it once a process, and of its own convolution
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


EVERY = set(Operation)
FORMATS = [torch.contiguous_format, torch.channels_last]


def pair(*args: Any, x: Tensor, algorithm: str = "gemm", **options: Any) -> tuple[nn.Module, Any]:
    """Torch's module and ours with the same parameters, tuned for x."""
    torchs = nn.ConvTranspose2d(*args, **options).to(x.dtype)
    ours = tune_by_hand(copy.deepcopy(torchs), x, algorithm)
    assert type(ours) is mucudnn.ConvTranspose2d
    return torchs, ours


@pytest.mark.parametrize(("filters", "images"), [(a, b) for a in FORMATS for b in FORMATS])
@pytest.mark.parametrize("channels", [(4, 6), (1, 6), (4, 1), (1, 1)], ids=str)
def test_memory_formats_are_torchs(
    channels: tuple[int, int], filters: torch.memory_format, images: torch.memory_format
) -> None:
    x = torch.randn(2, channels[0], 5, 6).to(memory_format=images)
    torchs = nn.ConvTranspose2d(*channels, 3, stride=2).to(memory_format=filters)  # type: ignore[call-overload]
    ours = tune_by_hand(copy.deepcopy(torchs), x)
    assert_exact(ours, torchs, x)
    assert ran(ours)


@pytest.mark.parametrize("unbatched", [False, True])
def test_output_size(unbatched: bool) -> None:
    x = torch.randn(4, 5, 6) if unbatched else torch.randn(3, 4, 5, 6)

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 6, 3, stride=3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.up(x, output_size=[16, 20])
            return y

    torchs = Sized()
    ours = tune_by_hand(copy.deepcopy(torchs), x)
    assert ours(x).shape[-2:] == (16, 20)
    assert_exact(ours, torchs, x)
    assert ran(ours) == EVERY
    for model in (torchs, ours):
        with pytest.raises(ValueError, match="requested an output size"):
            model.up(x, output_size=[3, 3])


def test_output_padding_that_no_convolution_transposes_is_torchs() -> None:
    """Torch allows it up to the dilation; from the stride on the convolution of the result would be larger than x."""
    x = torch.randn(2, 4, 5, 6)
    torchs = nn.ConvTranspose2d(4, 6, 3, dilation=3, output_padding=2)
    assert trace(torchs, x) == []
    other = nn.ConvTranspose2d(4, 6, 3, dilation=3, output_padding=0)
    ours = tune_by_hand(copy.deepcopy(other), torch.randn(2, 4, 7, 8))
    torchs.load_state_dict(other.state_dict())
    ours.output_padding = (2, 2)
    assert trace(ours, x) == []
    assert_exact(ours, torchs, x)
    assert ran(ours) == set()


def test_the_shape_that_is_lent_takes_no_memory() -> None:
    """Beside y there are one sample's im2col matrix and small change, and no second y."""
    x = torch.randn(16, 4, 16, 16)
    _, ours = pair(4, 64, 3, x=x, bias=False)
    with torch.no_grad():
        y = ours(x)
        peak_bytes = peak_allocated_bytes(lambda: ours(x))
    assert peak_bytes < 1.5 * y.nbytes
