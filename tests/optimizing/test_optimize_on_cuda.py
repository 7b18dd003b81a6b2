"""``optimize`` with a model on a GPU, as far as the tuning: device, dtype and memory format of what is tuned.

Nothing is measured: tensors are fake ones, or those of the CPU in the place of the GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest
import torch
from support.cuda.placeholders import MODE, module_on_cuda, on_cuda
from torch import nn

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.optimizing import optimize as optimizing
from mucudnn.tuning.trace import trace


def two_convolutions(r: int = 1) -> nn.Sequential:
    """From 3 channels to 8 and, by filters of r x r, to 4."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, r))


PROBLEM = ConvProblem(Operation.FORWARD, c=3, h=8, w=8, k=8, r=3, s=3, padding=(1, 1))
GPU = torch.device("cuda", 1)


class StoppedError(Exception):
    """Instead of tuning."""


@pytest.fixture
def tuned_on(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A CPU model counts as one on ``GPU``; the devices that were current, and the one asked for, when it was tuned."""
    current: list[object] = []
    asked: list[object] = []

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.remove(device)

    def tune_tasks(tasks: object, config: Config, *, device: str, **_: object) -> NoReturn:
        asked.extend((*current, device))
        raise StoppedError

    monkeypatch.setattr(optimizing, "device_of_convolutions", lambda model: GPU)
    monkeypatch.setattr(optimizing, "made_current", made_current)
    monkeypatch.setattr(optimizing, "tune_tasks", tune_tasks)
    return asked


def test_it_is_tuned_on_the_models_own_gpu(tuned_on: list[object]) -> None:
    model = two_convolutions()
    with pytest.raises(StoppedError):
        mucudnn.optimize(model, torch.randn(2, 3, 8, 8))
    assert tuned_on == [GPU, "cuda"]
    assert type(model[0]) is nn.Conv2d


def test_convolutions_on_several_devices_are_refused_before_anything_runs() -> None:
    model = two_convolutions()
    model[2] = module_on_cuda(model[2])
    with pytest.raises(InvalidInputError, match=r"cpu \(0\), cuda:0 \(2\)"):
        mucudnn.optimize(model, torch.randn(2, 3, 8, 8))


def traced_on_cuda(dtype: torch.dtype = torch.float32) -> ConvProblem:
    model = module_on_cuda(two_convolutions().to(dtype=dtype, memory_format=torch.channels_last))  # type: ignore[call-overload]
    with MODE, torch.no_grad():
        return trace(model, on_cuda(torch.empty(2, 3, 8, 8, dtype=dtype)))[0].problem


def test_dtype_and_memory_format_are_those_of_the_gpu() -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):  # float64 never is in channels_last there
        expected = MemoryFormat.CONTIGUOUS if dtype == torch.float64 else MemoryFormat.CHANNELS_LAST
        assert traced_on_cuda(dtype).memory_format is expected
    with torch.autocast("cpu", torch.bfloat16):
        assert traced_on_cuda().dtype == "float32"
    torch.set_autocast_enabled("cuda", True)
    try:
        assert traced_on_cuda().dtype == "float16"
    finally:
        torch.set_autocast_enabled("cuda", False)
