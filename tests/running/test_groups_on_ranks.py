"""Groups under DistributedDataParallel: gradients get ready in the same order as without, and ranks keep equal bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks.group import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.running.norms import TunedNorm, make_groups

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled"),
]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms, self.relu = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)]), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        y += x
        return self.relu(y)


def trained(rank: int, is_grouped: bool) -> dict[str, Any]:
    """Train three steps, in buckets of one gradient; return the order of the gradients and the parameters."""
    torch.manual_seed(0)
    net, x = nn.Sequential(Residual(), Residual()), torch.randn(4, 8, 10, 10)
    if is_grouped:
        make_groups(net, lambda model: model(x))
    parallel = DistributedDataParallel(net, bucket_cap_mb=1e-6)  # type: ignore[arg-type]
    order: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(lambda name, _: order.append(name), name))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        parallel(x + rank + step).square().mean().backward()
        optimizer.step()
    values = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    return {"order": order, "values": values, "groups": sum(isinstance(part, TunedNorm) for part in net.modules())}


def test_gradients_get_ready_in_the_same_order_and_ranks_keep_equal_bits(ranks: Mapping[int, Ranks]) -> None:
    without, grouped = (ranks[2].run(trained, is_grouped) for is_grouped in (False, True))
    assert [result["groups"] for result in (without[0], grouped[0])] == [0, 4]
    for first, second in (without, grouped):
        assert torch.equal(first["values"], second["values"])
    assert without[0]["order"] == grouped[0]["order"] == grouped[1]["order"]
    torch.testing.assert_close(grouped[0]["values"], without[0]["values"], rtol=1e-3, atol=1e-4)
