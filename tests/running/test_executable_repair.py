"""What operators compute where what was tuned cannot run, and what is said of it; cuDNN is a fake on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.cudnn.backend import PICKY, RANDOM, STEADY, FakeBackend, in_the_place_of_cudnn
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mucudnn.core import errors
from mucudnn.core.errors import CapturingError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.cudnn import algorithms
from mucudnn.kernels.cudnn.backend import Engine, EngineConfig, Plan
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.kernels.torch_convolution import torch_convolution
from mucudnn.running import choices, operators
from mucudnn.running.choices import Choices, executable_of, note_failure
from mucudnn.running.executable import StepError

FORWARD = ConvProblem(Operation.FORWARD, 4, 5, 4, 2, 3, 3)
GEOMETRY = (FORWARD.stride, FORWARD.padding, FORWARD.dilation, FORWARD.groups)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    return in_the_place_of_cudnn(monkeypatch)


class Layer:
    """One operation, tuned to what is given, and the operands of a call."""

    def __init__(self, *engines: tuple[EngineConfig, int], operation: Operation = Operation.FORWARD) -> None:
        self.problem = FORWARD.with_operation(operation)
        parts = tuple(MicroConfig(config.name, size) for config, size in engines)
        n = sum(size for _, size in engines)
        self.choices = Choices.of({self.problem: {n: Configuration(parts, 1.0, 0)}})
        self.x, self.w = torch.randn(FORWARD.x_shape(n)), torch.randn(FORWARD.w_shape())
        self.third = torch.randn(FORWARD.k if operation is Operation.FORWARD else FORWARD.y_shape(n))

    def __call__(self, x: Tensor | None = None) -> None:
        """One call, and its result is the convolution."""
        operation, x = self.problem.operation, self.x if x is None else x
        expected = torch_convolution(operation, x, self.w, self.third, GEOMETRY)
        computed = operators.OPERATORS[operation](x, self.w, self.third, *GEOMETRY, self.choices.handle)
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)


def failing(*configs: EngineConfig, status: int = 5000) -> Callable[[Plan], None]:
    def fail(plan: Plan) -> None:
        if plan.config in configs:
            raise CudnnError(f"execute {plan.config.name}", status, "CUDNN_STATUS_EXECUTION_FAILED", "its words")

    return fail


def ran(cudnn: FakeBackend) -> list[tuple[EngineConfig, int]]:
    done = [(plan.config, plan.micro_batch_size) for plan in cudnn.executed]
    cudnn.executed.clear()
    return done


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# An engine that fails


@pytest.mark.parametrize("operation", Operation)
def test_torchs_own_runs_from_then_on_and_it_is_said_once(cudnn: FakeBackend, operation: Operation) -> None:
    """Also where the second step of a sum fails."""
    layer = Layer((STEADY, 1), (PICKY, 4), operation=operation)
    cudnn.started = failing(PICKY)
    with pytest.warns(RuntimeWarning) as said:
        layer()
    assert [str(warning.message) for warning in said] == [
        f"cudnn:38 k2=5 k13=0 failed for 4 sample(s) of {layer.problem}: cuDNN: execute cudnn:38 k2=5 k13=0: "
        "CUDNN_STATUS_EXECUTION_FAILED: its words; from now on torch's own convolution runs there"
    ]
    cudnn.executed.clear()
    with silence():
        layer()
    assert ran(cudnn) == []


@pytest.mark.parametrize("hook", ["started", "building"])
def test_what_has_failed_is_not_tried_by_other_layers_of_the_same_shape(cudnn: FakeBackend, hook: str) -> None:
    setattr(cudnn, hook, failing(PICKY))
    with pytest.warns(RuntimeWarning, match="from now on torch's own convolution runs there"):
        Layer((PICKY, 4))()
    setattr(cudnn, hook, lambda plan: pytest.fail("tried again") if plan.config == PICKY else None)
    with silence():  # it has been said
        Layer((PICKY, 4), (STEADY, 1))()
    assert ran(cudnn) == []


OWN = "torch's own convolution"


def test_a_broken_context_is_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    words = CudnnError("execute", 5003, "CUDNN_STATUS_EXECUTION_FAILED", "")
    error = StepError(FORWARD, MicroConfig(STEADY.name, 4), words)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        choices.note_failure(error, torch.device("cuda", 0))


# What is not to be had now


def test_without_memory_inside_cudnn_the_engine_is_tried_again(cudnn: FakeBackend) -> None:
    layer = Layer((PICKY, 4))
    for hook in ("building", "started"):
        setattr(cudnn, hook, failing(PICKY, status=4004))
        with pytest.warns(RuntimeWarning, match="its words; torch's own convolution runs instead"):
            layer()
        errors._said.clear()
        setattr(cudnn, hook, lambda plan: None)
    layer()
    assert ran(cudnn) == [(PICKY, 4)]


def test_views_off_16_bytes_run_torchs_own_in_silence(cudnn: FakeBackend) -> None:
    layer = Layer((STEADY, 4))
    shifted = torch.randn(1 + layer.x.numel())[1:].view(layer.x.shape)
    with silence():
        layer(shifted)
        assert ran(cudnn) == []
        layer()
    assert ran(cudnn) == [(STEADY, 4)]


@pytest.mark.parametrize("can_be_planned", [False, True])
def test_an_engine_that_this_device_does_not_offer_leaves_it_to_torch(
    cudnn: FakeBackend, monkeypatch: pytest.MonkeyPatch, can_be_planned: bool
) -> None:
    layer, reason = Layer((PICKY, 1)), "NOT_SUPPORTED"
    if can_be_planned:
        monkeypatch.setattr(cudnn, "engine", lambda plan: Engine(plan.config, frozenset(), 0))
        reason = "cuDNN does not offer this engine configuration for 1 sample"
    with pytest.warns(RuntimeWarning, match=f"cudnn:38 k2=5 k13=0 1 cannot run here: .*{reason}.* torch's own"):
        layer()
    with silence():
        layer()
    assert ran(cudnn) == []


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [(PICKY, {"allow_tf32": False}, "rounds to TF32"), (RANDOM, {"deterministic": True}, "not deterministic")],
)
def test_settings_that_have_changed_since_it_was_tuned_leave_it_to_torch(
    cudnn: FakeBackend, monkeypatch: pytest.MonkeyPatch, config: EngineConfig, settings: dict[str, bool], reason: str
) -> None:
    layer = Layer((config, 4))
    of_torch = algorithms.TorchSettings.current()
    monkeypatch.setattr(algorithms, "TorchSettings", SimpleNamespace(current=lambda: replace(of_torch, **settings)))
    with pytest.warns(RuntimeWarning, match=f"{reason}.* torch's own convolution runs instead"):
        layer()
    assert ran(cudnn) == []


def test_what_this_thread_has_not_built_is_not_captured(cudnn: FakeBackend) -> None:
    layer, capturing = Layer((STEADY, 4)), [True]

    def start(plan: Plan) -> None:
        if capturing:
            raise CapturingError("the plan is not made yet")

    cudnn.started = start
    with pytest.warns(RuntimeWarning, match="not made yet; torch's own convolution runs instead"):
        layer()
    capturing.clear()
    with silence():
        layer()
    assert ran(cudnn) == [(STEADY, 4)]


# For which device executables are made, and when not; on CUDA tensors that are not there


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
