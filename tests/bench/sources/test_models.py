"""Models of sources that can be computed with."""

from __future__ import annotations

import torch
from torch import nn

from mucudnn.bench.sources.models import load_model, settle_statistics


def difference_of_outputs(model: nn.Module) -> float:
    """Relative, of two inputs that have nothing in common."""
    with torch.no_grad():
        one, other = (model.eval()(torch.randn(2, 3, 64, 64)) for _ in range(2))
    return float((one - other).norm() / other.norm())


def test_outputs_follow_the_inputs_once_statistics_are_settled() -> None:
    torch.manual_seed(0)
    model, _ = load_model("mobilenetv2")
    assert difference_of_outputs(model) < 0.01  # the bias of the last layer is all that is left
    settle_statistics(model, (torch.randn(4, 3, 64, 64),))
    assert difference_of_outputs(model) > 0.1
