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

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.registry import algorithm
from mucudnn.running import operators
from mucudnn.running.choices import Choices

STRIDE, PADDING, DILATION, GROUPS = (2, 1), (1, 0), (1, 2), 2


def divided(n: int) -> Configuration:
    return Configuration((MicroConfig("gemm", 1),) * n, time_s=1.0, workspace_bytes=0)


def choices_for(dtype: str, memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS, n: int = 3) -> Choices:
    geometry = STRIDE, PADDING, DILATION, GROUPS, dtype, memory_format
    problems = [ConvProblem(operation, 4, 5, 6, 2, 3, 2, *geometry) for operation in Operation]
    return Choices.of({problem: {n: divided(n)} for problem in problems})


def rest(choices: Choices | None) -> tuple[Any, ...]:
    return STRIDE, PADDING, DILATION, GROUPS, 0 if choices is None else choices.handle


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


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("bias_too", [True, False])
def test_opcheck(choices: Choices, operation: Operation, bias_too: bool) -> None:
    x, w, bias, dy = operands()
    third = dy if operation is not Operation.FORWARD else bias if bias_too else None
    torch.library.opcheck(operators.OPERATORS[operation], (x, w, third, *rest(choices)))


def test_what_is_not_tuned_runs_torchs_convolution(choices: Choices) -> None:
    baseline, unknown = (
        Choices.of({problem: {3: Configuration((MicroConfig(name, 3),), 1.0, 0)} for problem in choices.configurations})
        for name in ("native", "of-a-later-version")
    )
    elsewhere = Choices.of(choices.configurations, "cuda")
    cases = [(n, choices.handle) for n in (0, 1, 4)]  # other batch sizes
    for n, handle in (*cases, (3, baseline.handle), (3, unknown.handle), (3, elsewhere.handle), (3, 12345)):
        x, w, bias, _ = operands(n=n)
        y = operators.conv2d(x, w, bias, STRIDE, PADDING, DILATION, GROUPS, handle)
        assert torch.equal(y, torchs(x, w, bias)), (n, handle)
    assert ran(choices) == ran(baseline) == set()


def test_operands_that_do_not_fit_never_reach_an_algorithm(choices: Choices) -> None:
    x, w, bias, dy = (t.detach() for t in operands())
    for shape in ((3, 5, 5, 6), (3, 4, 1, 1), (4, 5)):
        with pytest.raises(RuntimeError):
            operators.conv2d(torch.randn(shape, dtype=torch.float64), w, bias, *rest(choices))
    for other in (torch.randn(3, dtype=torch.float64), torch.randn(2)):
        with suppress(RuntimeError):  # torch refuses it or not
            operators.conv2d(x, w, other, *rest(choices))
    with pytest.raises(RuntimeError):
        operators.OPERATORS[Operation.BACKWARD_FILTER](x, w, dy[..., :2], *rest(choices))
    assert ran(choices) == set()


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


def test_equal_choices_are_one_in_copies_and_have_their_handle_in_another_process() -> None:
    chosen = choices_for("float32")
    assert choices_for("float32") is copy.deepcopy(chosen) is pickle.loads(pickle.dumps(chosen)) is chosen
    assert choices_for("float32", n=2).handle not in (chosen.handle, 0)
    load = (
        "import pickle, sys\n"
        "from mucudnn.running import choices\n"
        "loaded = pickle.load(sys.stdin.buffer)\n"
        "print(loaded.handle, choices._registered[loaded.handle] is loaded)"
    )
    done = subprocess.run([sys.executable, "-c", load], input=pickle.dumps(chosen), capture_output=True, check=True)
    assert done.stdout.decode().split() == [str(chosen.handle), "True"]


def test_more_threads_than_the_limit_has_room_for_run_torchs_own() -> None:
    """Of a limit, and of a share, which has no other bytes than what was measured; it is said once."""
    problem, n, before = ConvProblem(Operation.FORWARD, 8, 12, 12, 8, 3, 3), 2, torch.get_num_threads()
    if (reason := algorithm("implicit-gemm").supports(problem)) is not None:
        pytest.skip(reason)
    x, w = torch.randn(problem.x_shape(n)), torch.randn(problem.w_shape())
    call = x, w, None, problem.stride, problem.padding, problem.dilation, problem.groups
    try:
        torch.set_num_threads(1)
        needed = algorithm("implicit-gemm").workspace(problem, n)
        chosen = Configuration((MicroConfig("implicit-gemm", n),), 1.0, needed.prepared_bytes + needed.scratch_bytes)
        shared = Choices.of({problem: {n: chosen}}, keeps_workspace=False)
        limited = Choices.of({problem: {n: chosen}}, limit_bytes=chosen.workspace_bytes)
        expected = [operators.conv2d(*call, choices.handle) for choices in (shared, limited)]
        assert None not in [*shared.executables.values(), *limited.executables.values()]
        torch.set_num_threads(16)
        with pytest.warns(
            RuntimeWarning, match="with 16 threads its workspace is .*; optimize the model again"
        ) as said:
            found = [operators.conv2d(*call, choices.handle) for choices in (shared, limited)]
        assert len(said) == 1
        torch.testing.assert_close(found, expected)
        assert [*shared.executables.values()][1:] == [*limited.executables.values()][1:] == [None]
    finally:
        torch.set_num_threads(before)
