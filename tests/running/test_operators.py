"""The three operators: values and gradients of every order, and what torch's subsystems ask of an operator."""

import copy
import pickle
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mucudnn.running import choices as choices_module
from mucudnn.running import operators
from mucudnn.running.choices import UNTUNED, Choices
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Configuration, MicroConfig

STRIDE, PADDING, DILATION, GROUPS = (2, 1), (1, 0), (1, 2), 2


def divided(n: int) -> Configuration:
    return Configuration((MicroConfig("gemm", 1),) * n, time_s=1.0, workspace_bytes=0)


def choices_for(dtype: str, memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS, n: int = 3) -> Choices:
    geometry = STRIDE, PADDING, DILATION, GROUPS, dtype, memory_format
    problems = [ConvProblem(operation, 4, 5, 6, 2, 3, 2, *geometry) for operation in Operation]
    return Choices.of({problem: {n: divided(n)} for problem in problems})


def rest(choices: Choices | None) -> tuple[Any, ...]:
    return STRIDE, PADDING, DILATION, GROUPS, UNTUNED if choices is None else choices.handle


def operands(dtype: torch.dtype = torch.float64, n: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, bias, dy; all want a gradient."""
    shapes = (n, 4, 5, 6), (2, 2, 3, 2), (2,), (n, 2, 3, 4)
    x, w, bias, dy = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return x, w, bias, dy


def torchs(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(x, w, bias, STRIDE, PADDING, DILATION, GROUPS)


def ran(choices: Choices) -> set[str]:
    """The operations that ran a configuration."""
    return {executable.problem.operation for executable in choices.executables.values() if executable is not None}


@pytest.fixture
def choices() -> Choices:
    chosen = choices_for("float64")
    chosen.executables.clear()
    return chosen


@pytest.mark.parametrize("memory_format", MemoryFormat)
def test_results_and_gradients_are_torchs(memory_format: MemoryFormat) -> None:
    chosen = choices_for("float32", memory_format)
    chosen.executables.clear()
    x, w, bias, dy = operands(torch.float32)
    if memory_format is MemoryFormat.CHANNELS_LAST:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    y, expected = operators.conv2d(x, w, bias, *rest(chosen)), torchs(x, w, bias)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)  # strides as well
    gradients, wanted = (torch.autograd.grad(result, (x, w, bias), dy) for result in (y, expected))
    torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-5)
    assert ran(chosen) == set(Operation)


@pytest.mark.parametrize("tuned", [True, False])
def test_gradients_of_first_and_second_order(choices: Choices, tuned: bool) -> None:
    def convolve(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return operators.conv2d(x, w, bias, *rest(choices if tuned else None))

    x, w, bias, _ = operands()
    assert torch.autograd.gradcheck(convolve, (x, w, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(convolve, (x, w, bias), fast_mode=True)
    assert ran(choices) == (set(Operation) if tuned else set())


@pytest.mark.parametrize("operation", [Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER])
def test_gradients_of_the_backward_operators(choices: Choices, operation: Operation) -> None:
    x, w, _, dy = operands()
    compute = operators.OPERATORS[operation]
    assert torch.autograd.gradgradcheck(lambda *t: compute(*t, *rest(choices)), (x, w, dy), fast_mode=True)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("bias_too", [True, False])
def test_opcheck(choices: Choices, operation: Operation, bias_too: bool) -> None:
    x, w, bias, dy = operands()
    third = dy if operation is not Operation.FORWARD else bias if bias_too else None
    torch.library.opcheck(operators.OPERATORS[operation], (x, w, third, *rest(choices)))


@pytest.mark.parametrize("n", [0, 1, 4])
def test_batches_that_are_not_tuned_run_torchs_convolution(choices: Choices, n: int) -> None:
    x, w, bias, _ = operands(n=n)
    assert torch.equal(operators.conv2d(x, w, bias, *rest(choices)), torchs(x, w, bias))
    assert ran(choices) == set()


def test_unknown_handle_runs_torchs_convolution() -> None:
    x, w, bias, _ = operands()
    y = operators.conv2d(x, w, bias, STRIDE, PADDING, DILATION, GROUPS, 12345)
    assert torch.equal(y, torchs(x, w, bias))


def test_baseline_is_torchs_convolution_itself() -> None:
    baseline = Configuration((MicroConfig("native", 3),), time_s=1.0, workspace_bytes=0)
    chosen = Choices.of({problem: {3: baseline} for problem in choices_for("float64").configurations})
    x, w, bias, _ = operands()
    assert torch.equal(operators.conv2d(x, w, bias, *rest(chosen)), torchs(x, w, bias))
    assert ran(chosen) == set()


@pytest.mark.parametrize("x_shape", [(3, 5, 5, 6), (3, 4, 1, 1), (4, 5)])
def test_what_is_no_convolution_gets_torchs_error(choices: Choices, x_shape: tuple[int, ...]) -> None:
    _, w, bias, _ = operands()
    with pytest.raises(RuntimeError):
        operators.conv2d(torch.randn(x_shape, dtype=torch.float64), w, bias, *rest(choices))


@pytest.mark.parametrize("bias", [torch.randn(3, dtype=torch.float64), torch.randn(2)], ids=["length", "dtype"])
def test_bias_that_does_not_fit_never_reaches_an_algorithm(choices: Choices, bias: Tensor) -> None:
    x, w, _, _ = operands()
    with suppress(RuntimeError):  # torch refuses it or not
        operators.conv2d(x, w, bias, *rest(choices))
    assert ran(choices) == set()


def test_gradient_that_does_not_fit_never_reaches_an_algorithm(choices: Choices) -> None:
    x, w, _, dy = (t.detach() for t in operands())
    with pytest.raises(RuntimeError):
        operators.conv2d_backward_filter(x, w, dy[..., :2], *rest(choices))
    assert ran(choices) == set()


def test_choices_of_another_device_or_with_unknown_algorithms_are_passed_over(choices: Choices) -> None:
    x, w, bias, _ = operands()
    elsewhere = Choices.of(choices.configurations, "cuda")
    unknown = Configuration((MicroConfig("of-a-later-version", 3),), time_s=1.0, workspace_bytes=0)
    later = Choices.of({problem: {3: unknown} for problem in choices.configurations})
    for chosen in (elsewhere, later):
        assert torch.equal(operators.conv2d(x, w, bias, *rest(chosen)), torchs(x, w, bias))


def test_autocast_computes_in_bfloat16_and_leaves_float64_alone(choices: Choices) -> None:
    x, w, bias, _ = operands(torch.float32)
    chosen = choices_for("bfloat16")
    chosen.executables.clear()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = operators.conv2d(x, w, bias, *rest(chosen)), torchs(x, w, bias)
        wide = operators.conv2d(*operands()[:3], *rest(choices))
    assert (y.dtype, wide.dtype) == (torch.bfloat16, torch.float64)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    assert ran(chosen) == {Operation.FORWARD}
    (dx,) = torch.autograd.grad(y.float().sum(), x)
    assert dx.dtype == torch.float32


def test_equal_choices_are_one_and_survive_copies() -> None:
    chosen = choices_for("float32")
    assert choices_for("float32") is chosen
    assert copy.deepcopy(chosen) is chosen
    assert pickle.loads(pickle.dumps(chosen)) is chosen
    assert choices_for("float32", n=2).handle not in (chosen.handle, UNTUNED)


def test_pickled_choices_have_the_same_handle_in_another_process() -> None:
    chosen = choices_for("float32")
    load = (
        "import pickle, sys\n"
        "from mucudnn.running import choices\n"
        "loaded = pickle.load(sys.stdin.buffer)\n"
        "print(loaded.handle, choices._registered[loaded.handle] is loaded)"
    )
    done = subprocess.run([sys.executable, "-c", load], input=pickle.dumps(chosen), capture_output=True, check=True)
    assert done.stdout.decode().split() == [str(chosen.handle), "True"]


def test_executables_of_shapes_that_never_come_back_do_not_pile_up(
    choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices_module, "_EXECUTABLES_CACHED", 3)
    for n in range(1, 9):
        operators.conv2d(*(t.detach() for t in operands(n=n)[:3]), *rest(choices))
    assert len(choices.executables) <= 3
