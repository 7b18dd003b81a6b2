"""The calls that are timed of an algorithm: through a module, as training makes them, and the algorithm alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mucudnn.bench.measure.operands import Operands
from mucudnn.bench.measure.whole_runs import run_torch, run_whole
from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.modules.conv2d import Conv2d
from mucudnn.running.operators import Choices
from mucudnn.running.workspace import lasting_buffer
from mucudnn.words.errors import LibraryError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.torch_settings import TORCHS_OWN


def undivided(algorithm: Algorithm, batch_size: int) -> Configuration:
    """Return the configuration in which an algorithm computes the whole mini-batch at once."""
    return Configuration((MicroConfig(algorithm.name, batch_size),), time_s=0.0, workspace_bytes=0)


def compute(algorithm: Algorithm, problem: ConvProblem, operands: Operands) -> Tensor:
    """Compute a problem on operands. Raises what fails: nothing stands in for the algorithm."""
    return run_whole(problem, undivided(algorithm, operands.batch_size), operands)


def through_module(algorithm: Algorithm, problem: ConvProblem, operands: Operands) -> Callable[[], Tensor]:
    """Make ready the call of a module that runs the algorithm: it returns what the operation writes, newly allocated.

    forward: the module's call, in which autograd records what the backward pass needs. The others: autograd's call for
    that one gradient, of a forward pass that was made before. Torch's own runs in ``nn.Conv2d``, the others in
    ``mucudnn.Conv2d``.

    Raises ``LibraryError`` where the module would run something else than the algorithm.
    """
    module = _module(algorithm, problem, operands)
    if problem.operation is Operation.FORWARD:
        return partial(module, operands.x)
    of_data = problem.operation is Operation.BACKWARD_DATA
    x = operands.x.detach().requires_grad_(of_data)
    y = module(x)
    wanted = x if of_data else module.weight

    def gradient() -> Tensor:
        return torch.autograd.grad(y, wanted, operands.y, retain_graph=True)[0]

    return gradient


def alone(algorithm: Algorithm, problem: ConvProblem, operands: Operands) -> Callable[[], object]:
    """Make ready the algorithm without any module, autograd or allocation: it writes into the operands.

    Torch's own is its convolution without autograd, which allocates its result.
    """
    if algorithm.name == TORCHS_OWN:
        return partial(run_torch, problem, operands)
    sizes = algorithm.workspace(problem, operands.batch_size)
    prepared, scratch = (
        lasting_buffer(size).to(operands.x.device) for size in (sizes.prepared_bytes, sizes.scratch_bytes)
    )
    x, w, y = operands.x, operands.w, operands.y

    def call() -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            w.zero_()
        algorithm.open(problem, w, prepared)
        algorithm.step(problem, x, w, y, None, prepared, scratch)
        algorithm.close(problem, w, prepared)

    return call


def _module(algorithm: Algorithm, problem: ConvProblem, operands: Operands) -> nn.Conv2d:
    geometry = (problem.c, problem.k, (problem.r, problem.s), problem.stride, problem.padding, problem.dilation)
    kind = nn.Conv2d if algorithm.name == TORCHS_OWN else Conv2d
    module = kind(*geometry, problem.groups, bias=False, device="meta")
    module.weight = nn.Parameter(operands.w.detach(), requires_grad=problem.operation is not Operation.BACKWARD_DATA)
    if isinstance(module, Conv2d):
        module.choices = _choices(algorithm, problem, operands)
    return module


def _choices(algorithm: Algorithm, problem: ConvProblem, operands: Operands) -> Choices:
    """Choose the algorithm for its operation alone."""
    n = operands.batch_size
    choices = Choices.of({problem: {n: undivided(algorithm, n)}}, operands.x.device.type)
    recipe = choices.recipe(problem, n)
    if recipe is None or recipe.configuration != choices.configuration(problem, n):
        raise LibraryError(f"a module does not run {algorithm.name} here: see the warning before")
    return choices
