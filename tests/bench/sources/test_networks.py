"""The built-in networks against their published sizes, without computing anything (meta device)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mucudnn.bench.sources.networks import INPUT_SHAPE, NETWORKS, build
from mucudnn.words.errors import InvalidInputError

# (parameters, 10^9 multiply-adds for one image of 224x224), both as published with torchvision's weights
PUBLISHED = {
    "alexnet": (61_100_840, 0.714),
    "vgg16": (138_357_544, 15.470),
    "resnet18": (11_689_512, 1.814),
    "resnet50": (25_557_032, 4.089),
    "googlenet": (6_624_904, 1.498),
}


@pytest.fixture(params=sorted(PUBLISHED))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build_on_meta(name: str, num_classes: int = 1000) -> nn.Module:
    with torch.device("meta"):
        return build(name, num_classes)


def test_parameter_count_is_the_published_one(name: str) -> None:
    assert sum(p.numel() for p in build_on_meta(name).parameters()) == PUBLISHED[name][0]


def test_forward_does_the_published_work(name: str) -> None:
    model = build_on_meta(name)
    multiply_adds = []

    def count(module: nn.Module, inputs: object, y: torch.Tensor) -> None:
        multiply_adds.append(y.numel() * module.get_parameter("weight")[0].numel())

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    model(torch.empty(1, *INPUT_SHAPE, device="meta"))
    assert sum(multiply_adds) / 1e9 == pytest.approx(PUBLISHED[name][1], abs=5e-4)


def test_scores_have_one_column_a_class(name: str) -> None:
    scores = build_on_meta(name, num_classes=7)(torch.empty(2, *INPUT_SHAPE, device="meta"))
    assert scores.shape == (2, 7)


def test_all_networks_are_tested() -> None:
    assert set(NETWORKS) == set(PUBLISHED)


def test_unknown_name_says_what_is_allowed_and_what_is_close() -> None:
    with pytest.raises(InvalidInputError, match=r"'resnet19'; did you mean resnet18\? allowed are alexnet, vgg16,"):
        build("resnet19")
