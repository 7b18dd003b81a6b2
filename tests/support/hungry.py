"""Small networks of every shape, and executables that ask for a workspace of any size and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mucudnn
from mucudnn.bench.sources.networks.blocks import Branches, Residual
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration
from mucudnn.running import choices as choices_module
from mucudnn.running import operators
from mucudnn.running.choices import Choices
from mucudnn.running.executable import Executable, Result
from mucudnn.running.problems import problem_of_call

Limits = Mapping[tuple[str, Operation], int]


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


def body(channels: int, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False, groups=groups)
    return [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


def plain() -> nn.Module:
    pooled = nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*pooled, nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 6 * 6, 5))


def residual() -> nn.Module:
    stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    return nn.Sequential(stem, Residual(nn.Sequential(*body(8)), nn.Identity()), *body(8), nn.Conv2d(8, 4, 1))


def grouped() -> nn.Module:
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    return nn.Sequential(nn.Conv2d(3, 8, 1), *body(8, groups=2), depthwise, nn.Dropout(), nn.Conv2d(8, 8, 3, stride=2))


def branched() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), Branches(nn.Sequential(*body(6)), nn.Conv2d(6, 4, 1)), nn.Conv2d(10, 2, 3))


def checkpointed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), Checkpointed(*body(8), *body(8)), Checkpointed(*body(8)), nn.Conv2d(8, 2, 3)
    )


def shared() -> nn.Module:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    return nn.Sequential(conv, nn.ReLU(), conv, nn.MaxPool2d(2), conv, nn.Flatten())


NETS: tuple[Callable[[], nn.Module], ...] = (plain, residual, grouped, branched, checkpointed, shared)


class Hungry(Executable):
    """An executable that allocates a workspace and computes zeros."""

    @classmethod
    def with_workspace(cls, problem: ConvProblem, x: Tensor, workspace_bytes: int) -> Hungry:
        result = Result.of(problem, len(x), x.device.type)
        return cls(problem, Configuration((), 0.0, 0), (), slice(0, workspace_bytes), result)

    def execute(self, x: Tensor, w: Tensor, y: Tensor, *_: object) -> None:
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8)
        written = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}
        written[self.problem.operation].zero_()
        del workspace


def make_hungry(model: nn.Module, workspaces: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution becomes ours, with these bytes of workspace; 0 for operations that have none."""
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    for handle, (_, module) in enumerate(modules):
        module.__class__ = mucudnn.Conv2d
        module.choices = Choices({}, "cpu")
        module.choices.handle, module.choices.x_shapes = handle, Everything()  # type: ignore[assignment]

    def executable(choices: Any, operation: Operation, x: Tensor, w: Tensor, third: Any, geometry: Any) -> Any:
        problem = problem_of_call(x, w, *geometry)
        assert problem is not None
        problem = problem.with_operation(operation)
        return Hungry.with_workspace(problem, x, workspaces.get((modules[choices.handle][0], operation), 0))

    monkeypatch.setattr(choices_module, "_registered", {module.choices.handle: module.choices for _, module in modules})
    monkeypatch.setattr(operators, "executable_of", executable)


class Everything:
    def __contains__(self, shape: object) -> bool:
        return True
