"""Models tuned without measuring, so that every convolution runs an algorithm of ours."""

from __future__ import annotations

from typing import TypeVar, cast

from torch import Tensor, nn

import mucudnn
from mucudnn.running.operators import Choices
from mucudnn.tracing.convolutions import trace
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig

Model = TypeVar("Model", bound=nn.Module)


def tune_by_hand(model: Model, x: Tensor, algorithm: str = "gemm") -> Model:
    """As ``mucudnn.optimize`` does it: each ``nn.Conv2d`` that runs gets one algorithm, a sample a step."""
    modules = dict(model.named_modules())
    for call in trace(model, x):
        if type(modules[call.name]) is nn.Conv2d:
            modules[call.name].__class__ = mucudnn.Conv2d
            cast(mucudnn.Conv2d, modules[call.name]).choices = _choices(call.problem, call.batch_size, algorithm)
    return model


def _choices(problem: ConvProblem, n: int, algorithm: str) -> Choices:
    by_size = {n: Configuration((MicroConfig(algorithm, 1),) * n, time_s=1e-3, workspace_bytes=0)}
    choices = Choices.of({problem.with_operation(operation): by_size for operation in Operation})
    choices.recipes.clear()
    return choices


def ran(model: nn.Module) -> set[str]:
    """The operations that ran a configuration anywhere in the model."""
    choices = [module.choices for module in model.modules() if isinstance(module, mucudnn.Conv2d)]
    recipes = [recipe for chosen in choices if chosen is not None for recipe in chosen.recipes.values()]
    return {recipe.problem.operation for recipe in recipes if recipe is not None}
