"""Graphs without operators in place: the values of the model, and no second trace where none is needed."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

from mucudnn.graph.rewrites.functional import functional


class Calls(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.conv, self.norm = function, nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.norm.running_mean, self.norm.running_var = torch.randn(4), torch.rand(4) + 0.5
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def viewed_before(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)
    view = y.flatten(1)
    y.relu_()
    return view


def read_before(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)
    doubled = y * 2
    y.relu_()
    return y + doubled


def written_part(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)
    y[:, 1:].mul_(3)
    return y.relu_()


def written_argument(m: nn.Module, x: Tensor) -> Tensor:
    return m.conv(x.clone().relu_())


def other_dtype(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)
    return y.gt_(0) * 2


def through_dropout(m: nn.Module, x: Tensor) -> Tensor:
    y = m.conv(x)
    dropped = F.dropout(y, 0.5, training=False)
    dropped.relu_()
    return y.add_(1)


TRACED_ONCE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "in place": lambda m, x: F.relu_(m.norm(m.conv(x))),
    "a chain": lambda m, x: m.conv(F.hardtanh_(F.silu(m.conv(x), inplace=True).add_(x).mul_(0.5), -1, 1)),
    "read before": read_before,
    "a copy of the argument": written_argument,
    "dropout": through_dropout,
    "dropout in place": lambda m, x: F.dropout(m.conv(x).flatten(1), 0.5, training=False, inplace=True),
    "viewed after": lambda m, x: m.conv(x).relu_().flatten(1),
    "chunks": lambda m, x: torch.cat(m.conv(x).chunk(3, 1)[::-1], 1),
    "reshaped": lambda m, x: m.conv(x).permute(0, 2, 3, 1).reshape(2, -1),
    "contiguous": lambda m, x: m.conv(x).transpose(2, 3).contiguous().view(2, -1),
}
TRACED_AGAIN = {
    "viewed before": viewed_before,
    "a part": written_part,
    "another dtype": other_dtype,
    "a composition of views": lambda m, x: m.conv(x).view_as(x),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about its own code
@pytest.mark.parametrize("name", [*TRACED_ONCE, *TRACED_AGAIN])
def test_no_operator_writes_an_operand(name: str) -> None:
    model, x = Calls({**TRACED_ONCE, **TRACED_AGAIN}[name]), torch.randn(2, 4, 6, 5)
    with torch.no_grad():
        exported, expected = torch.export.export(model, (x.clone(),), strict=False), model(x.clone())
        again = ExportedProgram.run_decompositions
        with mock.patch.object(ExportedProgram, "run_decompositions", autospec=True, side_effect=again) as traced:
            program = functional(exported)
    assert traced.called == (name in TRACED_AGAIN)
    calls = [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not [node for node in calls if node.target._schema.is_mutable]
    program.graph.lint()
    program.graph_module.recompile()
    with torch.no_grad():
        assert torch.equal(program.module()(x.clone()), expected)
