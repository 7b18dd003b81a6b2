"""Which device a model is tuned on, and what is said where there are several."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.cuda.placeholders import module_on_cuda
from torch import nn

from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.running.devices import device_named, device_of, device_of_convolutions, made_current


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
    model = module_on_cuda(four_convolutions())
    model[5] = nn.Linear(8, 1)  # may be elsewhere, but for the headroom
    assert device_of_convolutions(model).type == "cuda"
    with pytest.raises(InvalidInputError, match=r"several devices: cuda:.*, cpu .*give a limit"):
        device_of(model)


def test_devices_are_named_and_a_gpu_is_made_current_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.running.devices.require_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device_named("cuda:1") == device_named(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert device_named("cuda") == torch.device("cuda")
    with pytest.raises(UnavailableError, match="device is 'cuda:2', but there are 2 GPUs, numbered from 0"):
        device_named("cuda:2")
    for wrong in ("gpu", "", "cuda:-1", "cuda:x", None, 1):
        with pytest.raises(InvalidInputError, match="device is "):
            device_named(wrong)
    made = made_current(torch.device("cuda", 1))
    assert isinstance(made, torch.cuda.device)
    assert made.idx == 1
    for current in ("cpu", "cuda", "cuda:0"):
        assert isinstance(made_current(torch.device(current)), nullcontext)
