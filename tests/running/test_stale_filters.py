"""Every way that torch has to change a weight is noticed: what runs is what a fresh preparation gives."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from support.model_changes import WEIGHT_CHANGES
from support.problems.kept_layers import fresh, images, layer
from torch import Tensor, nn

from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.running.executable import Executable

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled, so nothing is kept")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_way_to_change_a_weight_is_noticed(preparations: list[Executable], mode: Any) -> None:
    for way, change in WEIGHT_CHANGES.items():
        preparations.clear()
        module, x = layer(), images()
        with mode():
            before = module(x)
        change(module)
        module.eval()
        with mode():
            after = [module(x), module(x)]
            weight = module.weight  # parametrizations compute it anew
        for y in after:
            assert torch.equal(y, fresh(module, x, weight)), way
        assert way == "channels_last" or not torch.equal(after[0], before), way
        assert len(preparations) == 2, way


@torch.no_grad()
def test_what_runs_is_what_the_weight_is_each_time(preparations: list[Executable]) -> None:
    module, x = layer(), images()
    first, second = torch.randn(2, *module.weight.shape)
    for w in (first, second, first, first, second):
        module.weight.data.copy_(w)
        assert torch.equal(module(x), fresh(module, x))
    assert len(preparations) == 4
    cast(Tensor, module.bias).add_(1)
    assert torch.equal(module(x), fresh(module, x))
    module.bias = None
    assert torch.equal(module(x), fresh(module, x))
    assert len(preparations) == 4, "a changed bias needs no preparation"
    other, mine = nn.Parameter(torch.randn_like(module.weight)), module(x)
    assert torch.equal(torch.func.functional_call(module, {"weight": other}, x), fresh(module, x, other))
    assert torch.equal(module(x), mine)
    sharing = layer()
    sharing.weight = module.weight
    for change in (lambda: None, lambda: module.weight.mul_(2), lambda: sharing.weight.data.add_(1)):
        change()
        assert torch.equal(module(x), fresh(module, x))
        assert torch.equal(sharing(x), fresh(sharing, x))
    x = x.contiguous(memory_format=torch.channels_last)
    strides = torch.empty_like(module.weight, memory_format=torch.channels_last).stride()
    module.weight.data = module.weight.as_strided(module.weight.shape, strides)  # the same bytes, in another order
    assert torch.equal(module(x), fresh(module, x))
