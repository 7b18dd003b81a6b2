"""Which device a model is tuned on, and what is said where there are several."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.cuda.placeholders import module_on_cuda
from torch import nn

from mucudnn.running.devices import device_named, device_of, device_of_convolutions, made_current
from mucudnn.words.errors import InvalidInputError, UnavailableError


def four_convolutions() -> nn.Sequential:
    return nn.Sequential(*(nn.Conv2d(2, 2, 1, bias=False) for _ in range(4)), nn.Flatten(), nn.Linear(8, 1, bias=False))


@pytest.mark.parametrize("find", [device_of, device_of_convolutions])
def test_it_is_that_of_the_model(find: object) -> None:
    assert callable(find)
    assert find(four_convolutions()) == torch.device("cpu")
    assert find(nn.ReLU()) == torch.device("cpu")
    assert find(module_on_cuda(four_convolutions(), 1)) == torch.device("cuda", 1)


def test_convolutions_on_several_devices_are_named() -> None:
    model = four_convolutions()
    model[3] = module_on_cuda(model[3], 0)
    message = r"cpu \(0, 1, 2\), cuda:0 \(3\); call mucudnn.optimize on each part"
    with pytest.raises(InvalidInputError, match=message):
        device_of_convolutions(model)
    for index in range(3):
        model[index] = module_on_cuda(model[index], 1)
    with pytest.raises(InvalidInputError, match=r"cuda:1 \(0, 1, 2\), cuda:0 \(3\)"):
        device_of_convolutions(model)


def test_other_layers_may_be_elsewhere_but_for_the_headroom() -> None:
    model = module_on_cuda(four_convolutions())
    model[5] = nn.Linear(8, 1)
    assert device_of_convolutions(model) == torch.device("cuda", 0)
    with pytest.raises(
        InvalidInputError, match=r"cuda:0 \(0.weight, 1.weight, 2.weight and 1 more\), cpu .*give a limit"
    ):
        device_of(model)


def test_a_gpu_is_made_the_current_one_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made = made_current(torch.device("cuda", 1))
    assert isinstance(made, torch.cuda.device)
    assert made.idx == 1
    assert isinstance(made_current(torch.device("cpu")), nullcontext)


def test_a_gpu_may_be_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.running.devices.require_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_named("cuda:1") == device_named(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert device_named("cuda") == torch.device("cuda")
    with pytest.raises(UnavailableError, match="device is 'cuda:2', but there are 2 GPUs, numbered from 0"):
        device_named("cuda:2")


def test_cuda_without_a_number_is_the_current_gpu() -> None:
    assert isinstance(made_current(torch.device("cuda")), nullcontext)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:-1", "cuda:x", None, 1])
def test_what_names_no_device_is_refused(device: object) -> None:
    with pytest.raises(InvalidInputError, match="device is "):
        device_named(device)
