"""What users do to a model after it was optimized."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable
from random import Random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

# Ways to change the weight of a convolution of 4 to 6 channels, 3x3


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


WEIGHT_CHANGES: dict[str, Callable[[nn.Conv2d], object]] = {
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


# Ways to change a model, each of which changes what it computes if it concerns a part that is used


def _random_tensor(model: nn.Module, random: Random) -> Tensor:
    every = [one for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()]
    return random.choice(every)


def _leaf(model: nn.Module, random: Random) -> nn.Module:
    return random.choice([one for one in model.modules() if not [*one.children()]])


def _parent(model: nn.Module, random: Random) -> tuple[nn.Module, str]:
    return random.choice([(one, name) for one in model.modules() for name, _ in one.named_children()])


def _replace_data(model: nn.Module, random: Random) -> None:
    one = _random_tensor(model, random)
    one.data = torch.randn_like(one)


def _write_by_numpy(model: nn.Module, random: Random) -> None:
    array = _random_tensor(model, random).detach().numpy()
    np.add(array, 1, out=array)


def _load(model: nn.Module, random: Random) -> None:
    model.load_state_dict(
        {name: one + 1 if one.is_floating_point() else one for name, one in model.state_dict().items()}
    )


def _wrap(model: nn.Module, random: Random) -> None:
    parent, name = _parent(model, random)
    setattr(parent, name, nn.Sequential(getattr(parent, name), nn.Tanh()))


def _replace_forward(model: nn.Module, random: Random) -> None:
    leaf = _leaf(model, random)
    forward = leaf.forward
    leaf.forward = lambda *given: forward(*given) + 1


def _hook(model: nn.Module, random: Random) -> None:
    _leaf(model, random).register_forward_hook(lambda module, given, result: result * 2)


def _train(model: nn.Module, random: Random) -> None:
    _leaf(model, random).train()


def _set_a_number(model: nn.Module, random: Random) -> None:
    model.scale = random.random()  # type: ignore[assignment]


def _change_the_class(model: nn.Module, random: Random) -> None:
    leaf = _leaf(model, random)
    leaf.__class__ = type(f"Other{type(leaf).__name__}", (type(leaf),), {})


MODEL_CHANGES: dict[str, Callable[[nn.Module, Random], object]] = {
    "counted write": lambda model, random: _random_tensor(model, random).detach().add_(1),
    ".data in place": lambda model, random: _random_tensor(model, random).data.add_(1),
    ".data =": _replace_data,
    "NumPy": _write_by_numpy,
    "DLPack": lambda model, random: torch.from_dlpack(_random_tensor(model, random).detach()).add_(1),
    "load_state_dict": _load,
    "to another dtype and back": lambda model, random: model.bfloat16().float(),
    "wrapped layer": _wrap,
    "forward of an instance": _replace_forward,
    "hook": _hook,
    "training mode of a layer": _train,
    "number": _set_a_number,
    "class": _change_the_class,
}
