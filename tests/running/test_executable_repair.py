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

from mucudnn.core import errors
from mucudnn.core.errors import CapturingError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.cudnn import algorithms
from mucudnn.kernels.cudnn.backend import Engine, EngineConfig, Plan
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.kernels.torch_convolution import torch_convolution
from mucudnn.running import choices, operators
from mucudnn.running.choices import Choices
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
