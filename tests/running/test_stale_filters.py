"""Every way that torch has to change a weight is noticed: what runs is what a fresh preparation gives."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.problems.kept_layers import fresh, images, layer
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.running.executable import Executable

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled, so nothing is kept")


def step_of(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Conv2d], None]:
    def change(module: nn.Conv2d) -> None:
        optimizer = make(module.parameters(), lr=0.1, **options)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    return change


def without_gradient(change: Callable[[Tensor], object], mode: Any = torch.no_grad) -> Callable[[nn.Conv2d], None]:
    def changed(module: nn.Conv2d) -> None:
        with mode():
            change(module.weight)

    return changed


def load(module: nn.Conv2d, assign: bool = False) -> None:
    module.load_state_dict(nn.Conv2d(4, 6, 3).state_dict(), assign=assign)


def assign_data(module: nn.Conv2d) -> None:
    module.weight.data = torch.randn_like(module.weight)


def assign_parameter(module: nn.Conv2d) -> None:
    module.weight = nn.Parameter(torch.randn_like(module.weight))


def parametrized_and_changed(module: nn.Conv2d) -> None:
    parametrizations.weight_norm(module)
    with torch.no_grad():
        cast(Any, module).parametrizations.weight.original0.mul_(3)


def through_the_address(module: nn.Conv2d) -> None:
    ctypes.c_float.from_address(module.weight.data_ptr() + 40).value = 7.5


def by_another_process(module: nn.Conv2d) -> None:
    module.share_memory()
    array = module.weight.detach().numpy()
    process = multiprocessing.get_context("fork").Process(target=array.fill, args=(0.5,))
    process.start()
    process.join()
    assert process.exitcode == 0


def by_one_ulp(weight: Tensor) -> None:
    weight.view(torch.int32)[5, 3, 2, 2] += 1


WAYS: dict[str, Callable[[nn.Conv2d], object]] = {
    "SGD": step_of(torch.optim.SGD, foreach=False),
    "SGD fused": step_of(torch.optim.SGD, fused=True),
    "Adam": step_of(torch.optim.Adam, foreach=False),
    "load_state_dict": load,
    "load_state_dict assign": lambda module: load(module, assign=True),
    "copy_": without_gradient(lambda w: w.copy_(torch.randn_like(w))),
    "in place under no_grad": without_gradient(lambda w: w.mul_(2)),
    "in place in inference mode": without_gradient(lambda w: w.mul_(2), torch.inference_mode),
    "one element": without_gradient(lambda w: w[1, 2, 0, 1].add_(1e-3)),
    "one ulp": without_gradient(by_one_ulp),
    "two elements exchanged": without_gradient(lambda w: w[0, 0, 0, :2].copy_(w[0, 0, 0, :2].flip(0))),
    ".data in place": lambda module: module.weight.data.mul_(2),
    ".data =": assign_data,
    "set_": without_gradient(lambda w: w.set_(torch.randn_like(w))),
    "weight = Parameter": assign_parameter,
    "view": lambda module: module.weight.detach().view(-1)[3:9].fill_(0.25),
    "storage": lambda module: module.weight.untyped_storage().fill_(63),
    "NumPy": lambda module: np.multiply(module.weight.detach().numpy(), 2, out=module.weight.detach().numpy()),
    "DLPack": lambda module: torch.from_dlpack(module.weight.detach()).mul_(2),
    "address": through_the_address,
    "another process": by_another_process,
    "parametrization changed": parametrized_and_changed,
    "spectral_norm": parametrizations.spectral_norm,
    "channels_last": lambda module: module.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_way_to_change_a_weight_is_noticed(preparations: list[Executable], mode: Any) -> None:
    for way, change in WAYS.items():
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
