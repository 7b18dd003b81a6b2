"""Models tuned without measuring, so that every convolution runs an algorithm of ours."""

from __future__ import annotations

import copy
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.running.choices import Choices
from mucudnn.running.modules import TunedModule, make_tunable, why_left_alone
from mucudnn.tuning.trace import trace

Model = TypeVar("Model", bound=nn.Module)


def tune_by_hand(model: Model, x: Tensor, algorithm: str = "gemm") -> Model:
    """As ``mucudnn.optimize`` does it: each convolution that runs gets one algorithm, a sample a step."""
    modules = dict(model.named_modules())
    for call in trace(model, x):
        if why_left_alone(modules[call.name]) is None:
            make_tunable(modules[call.name])
            cast(TunedModule, modules[call.name]).choices = _choices(call.problem, call.batch_size, algorithm)
    return model


def _choices(problem: ConvProblem, n: int, algorithm: str) -> Choices:
    by_size = {n: Configuration((MicroConfig(algorithm, 1),) * n, time_s=1e-3, workspace_bytes=0)}
    choices = Choices.of({problem.with_operation(operation): by_size for operation in Operation})
    choices.executables.clear()
    return choices


def ran(model: nn.Module) -> set[str]:
    """The operations that ran a configuration anywhere in the model."""
    choices = [module.choices for module in model.modules() if isinstance(module, TunedModule)]
    chosen = [choice for choice in choices if isinstance(choice, Choices)]
    executables = [executable for choice in chosen for executable in choice.executables.values()]
    return {executable.problem.operation for executable in executables if executable is not None}


def results(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """y, dx and the gradients of the parameters, and the same of a penalty on dx: double backward."""
    x = x.detach().requires_grad_()
    wanted = [x, *model.parameters()]
    y = model(x)
    first = torch.autograd.grad(y.square().mean(), wanted, create_graph=True)
    second = torch.autograd.grad(first[0].square().sum(), wanted, allow_unused=True, materialize_grads=True)
    return y, *first, *second


def assert_exact(ours: nn.Module, torchs: nn.Module, x: Tensor, tolerance: float = 1e-5) -> None:
    """Compare with torch's in float64, with torch's own dtypes, and its strides of y and dx."""
    exact = results(copy.deepcopy(torchs).double(), x.double())
    mine, of_torch = results(ours, x), results(torchs, x)
    assert [t.dtype for t in mine] == [t.dtype for t in of_torch]
    compared = 1 if mine[0].dim() > 2 and mine[0].shape[-3] == 1 else 2  # dy of one channel is in both formats at once
    assert [t.stride() for t in mine[:compared]] == [t.stride() for t in of_torch[:compared]]
    for a, b in zip(mine, exact, strict=True):
        difference, size = (a.detach().double() - b.detach()).norm(), b.detach().norm()
        assert float(difference) <= tolerance * max(float(size), 1e-30)
