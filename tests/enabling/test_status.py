"""What ``status`` tells: the table, the sums and the frame."""

from __future__ import annotations

import pytest
import torch
from support.made_up_workshop import MadeUpWorkshop, enabled
from torch.nn import functional as F

from mucudnn.core.tables import WIDTH
from mucudnn.enabling.status import Status

W = torch.randn(6, 4, 3, 3)


def some_status() -> Status:
    """Two calls of a size that is tuned, one of another batch, one of larger images, and one that is never tuned."""
    with enabled(MadeUpWorkshop()) as session:
        x = torch.randn(4, 4, 8, 8, requires_grad=True)
        for _ in range(2):
            F.conv2d(x, W).sum().backward()
        F.conv2d(torch.randn(3, 4, 8, 8), W)
        F.conv2d(torch.randn(4, 4, 30, 30), W)
        F.conv_transpose2d(torch.zeros(1, 2, 4, 4), torch.zeros(2, 2, 3, 3), dilation=2, output_padding=1)
    return session.status()


def test_the_table_fits_and_names_what_was_met() -> None:
    text = str(some_status())
    lines = text.splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[0].split() == ["convolution", "calls", "forward", "backward", "data", "backward", "filter"]
    assert lines[1].split("  ")[0] == "4x8x8 -> 6, 3x3, batch 4"
    assert "gemm 2.00×" in lines[1]
    assert "~gemm 2.00×" in lines[2]
    assert "PyTorch, untuned" in lines[3]
    assert "4 problems: 2 measured, 1 nearest size, 1 not tuned; tuning took 2 s" in text
    assert "to be measured at call 2" in text
    assert "never tuned, 1 shape of call: torch.float32 on cpu, or not a convolution of images or" in text


def test_sums_and_the_frame_have_every_problem() -> None:
    status = some_status()
    assert status.gained_s == pytest.approx(2 * 2 * 4 * 0.01 + 3 * 0.01)
    assert status.gained_share == pytest.approx(0.5)
    assert status.spent_s == pytest.approx(2.0)
    frame = status.to_frame()
    assert len(frame) == len(status.problems) == 4
    assert list(frame["batch_size"]) == [4, 4, 3, 4]
    assert list(frame["origin"]) == ["measured", "measured", "nearest size", "not tuned"]
    assert frame["gained_s"].sum() == pytest.approx(status.gained_s)


def test_nothing_met_says_what_to_do() -> None:
    assert "call mucudnn.enable()" in str(Status())
    assert len(Status().to_frame()) == 0
    assert Status().gained_share is None
