"""For which device executables are made, and when not; on CUDA tensors that are not there, with a fake of cuDNN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from support.cudnn.backend import PICKY, STEADY, FakeBackend, in_the_place_of_cudnn
from torch._subclasses import FakeTensorMode

from mucudnn.core.errors import CapturingError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.cudnn.backend import EngineConfig
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.running.choices import Choices, executable_of, note_failure
from mucudnn.running.executable import StepError

FORWARD = ConvProblem(Operation.FORWARD, 4, 5, 4, 2, 3, 3)
GEOMETRY = (FORWARD.stride, FORWARD.padding, FORWARD.dilation, FORWARD.groups)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    return in_the_place_of_cudnn(monkeypatch)


def resolve(choices: Choices, device: str, n: int = 4) -> object:
    """The executable of a call on a device that need not be there."""
    with FakeTensorMode():
        x, w = torch.empty(FORWARD.x_shape(n), device=device), torch.empty(FORWARD.w_shape(), device=device)
        return executable_of(choices, Operation.FORWARD, x, w, None, GEOMETRY)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Devices that compute nothing."""
    cuda = SimpleNamespace(current=0, is_capturing=False)

    @contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        before, cuda.current = cuda.current, device.index
        yield
        cuda.current = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda.current)
    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.is_capturing)
    return cuda


def tuned(*engines: tuple[EngineConfig, int]) -> Choices:
    parts = tuple(MicroConfig(config.name, size) for config, size in engines)
    n = sum(size for _, size in engines)
    return Choices.of({FORWARD: {n: Configuration(parts, 1.0, 0)}}, "cuda")


def test_a_executable_is_not_made_while_a_graph_is_captured_and_not_forgotten_after(cuda: SimpleNamespace) -> None:
    choices = tuned((STEADY, 4))
    cuda.is_capturing = True
    with pytest.raises(CapturingError, match="run it once, then capture it"):
        resolve(choices, "cuda:0")
    assert resolve(choices, "cuda:0", 3) is None  # not tuned: nothing to miss
    cuda.is_capturing = False
    executable = resolve(choices, "cuda:0")
    assert executable is not None
    cuda.is_capturing = True
    assert resolve(choices, "cuda:0") is executable


def test_every_device_has_its_executables_and_its_failures(cuda: SimpleNamespace, cudnn: FakeBackend) -> None:
    choices, asked = tuned((PICKY, 4)), []
    cudnn.building = lambda plan: asked.append((cuda.current, plan.config))
    assert resolve(choices, "cuda:1") is resolve(choices, "cuda:1") is not resolve(choices, "cuda:0")
    assert asked == [(1, PICKY), (0, PICKY)]
    assert cuda.current == 0
    choices.executables.clear()
    words = CudnnError("execute", 5000, "CUDNN_STATUS_EXECUTION_FAILED", "")
    error = StepError(FORWARD, MicroConfig(PICKY.name, 4), words)
    note_failure(error, torch.device("cuda", 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "cudnn:38" in str(resolve(choices, "cuda:0").configuration)  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match="from now on torch's own convolution runs there"):
        assert resolve(choices, "cuda:1") is None


def test_settings_of_torch_belong_to_the_executable_tuned(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = tuned((PICKY, 4))
    executable = resolve(choices, "cuda:0")
    assert executable is not None
    precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    try:
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
        with pytest.warns(RuntimeWarning, match="rounds to TF32"):
            assert resolve(choices, "cuda:0") is None
    finally:
        torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
    assert resolve(choices, "cuda:0") is executable
