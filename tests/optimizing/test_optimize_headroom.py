"""``optimize`` within the headroom: tuned convolutions, and the peak of a training step is not above torch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from support.peaks import peak_bytes
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.sources.networks.blocks import Residual
from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.tuning import choose as choosing

ALGORITHMS = ("winograd-4x4", "implicit-gemm", "gemm")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def body(channels: int) -> list[nn.Module]:
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


def residual_net() -> nn.Sequential:
    """Its convolutions 1.body.0, 1.body.3 and 2 have one geometry, and run at different heights of the memory."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), Residual(nn.Sequential(*body(16), *body(16)), nn.Identity())),
        *(*body(16), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten()),
        nn.Linear(32 * 9, 5),
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """The same model with torch's convolutions and with ours."""

    torchs: nn.Module
    ours: nn.Module
    x: Tensor

    @property
    def convolutions(self) -> list[mucudnn.Conv2d]:
        return [module for module in self.ours.modules() if isinstance(module, mucudnn.Conv2d)]


@pytest.fixture(scope="module", params=FORMATS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Whatever fits is taken to be worth it, so that the layers are tuned however fast the machine is."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    torch_format = FORMATS[request.param]
    model = residual_net().to(memory_format=torch_format)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 24, 24).contiguous(memory_format=torch_format)
    config = Config(
        workspace_limit="headroom",
        algorithms=ALGORITHMS,
        time_limit="1s",
        database=tmp_path_factory.mktemp("headroom") / "measurements.sqlite",
        confirm=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "is_gain", lambda run: True)
        yield Pair(model, mucudnn.optimize(copy.deepcopy(model), x, config), x)


def test_the_peak_is_not_above_torchs_in_copies_and_pickles_too(pair: Pair) -> None:
    assert any(not tuned.configuration.is_baseline for module in pair.convolutions for tuned in module.tuned)
    for ours in (pair.ours, copy.deepcopy(pair.ours), pickle.loads(pickle.dumps(pair.ours))):
        assert peak_bytes(ours, pair.x) <= peak_bytes(pair.torchs, pair.x)
    every = [module.choices for module in pair.convolutions if module.choices is not None]
    assert every
    assert not any(choices.keeps_workspace for choices in every)
    for _, tuned in mucudnn.report(pair.ours).layers:
        assert tuned.limit_bytes is not None
        assert tuned.configuration.is_baseline or tuned.configuration.workspace_bytes <= tuned.limit_bytes


def test_equal_problems_have_limits_of_their_own(pair: Pair) -> None:
    """The first of equal layers has the most room in the forward pass, and the least in the backward pass."""
    limits = {(name, tuned.problem): tuned.limit_bytes for name, tuned in mucudnn.report(pair.ours).layers}
    first, last = ({problem for name, problem in limits if name == wanted} for wanted in ("1.body.0", "2"))
    shared = first & last
    assert {problem.operation for problem in shared} == set(Operation)
    for problem in shared:
        assert limits["1.body.0", problem] != limits["2", problem]
        if problem.operation is Operation.FORWARD:
            assert limits["1.body.0", problem] > limits["2", problem]  # type: ignore[operator]


PROBLEM = ConvProblem(Operation.FORWARD, c=16, h=16, w=16, k=16, r=3, s=3, padding=(1, 1))
