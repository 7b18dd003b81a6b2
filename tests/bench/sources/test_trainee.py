"""Models that learn from random images, each rank from others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mucudnn.bench.sources.trainee import Trainee, labelled_batches, loss_for, mean_square

SHAPE = (3, 8, 8)


def test_streams_have_other_images_of_the_same_classes() -> None:
    """The mean of many images of a class is its pattern, whatever the noise."""
    (images, labels), (others, others_labels) = (
        next(labelled_batches(1, 4000, SHAPE, classes=2, stream=stream)) for stream in (1, 2)
    )
    assert not torch.equal(images, others)
    for label in (0, 1):
        mean, other = images[labels == label].mean(0), others[others_labels == label].mean(0)
        torch.testing.assert_close(mean, other, rtol=0, atol=0.2)
    assert (images[labels == 0].mean(0) - images[labels == 1].mean(0)).abs().max() > 1


def test_networks_learn_what_they_are_for_and_models_of_users_to_give_zeros() -> None:
    assert loss_for("resnet18") is nn.functional.cross_entropy
    assert loss_for("package.module:factory") is mean_square
    x = torch.randn(2, *SHAPE)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    trainee = Trainee(model, loss=mean_square)
    losses = [trainee.learn(x, torch.zeros(2)).item() for _ in range(20)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_half_precision_learns_too(autocast: torch.dtype) -> None:
    """In float16 the gradients of a tiny loss are zero unless it is scaled."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    trainee = Trainee(model, 1e4, loss=lambda *of: 1e-6 * mean_square(*of))
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(3):
        trainee.learn(torch.randn(2, *SHAPE), torch.zeros(2), autocast)
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_loss_is_that_of_all_outputs() -> None:
    a, b = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)
    ignored = torch.ones(1), "text"
    assert mean_square({"a": a, "b": (b, ignored)}, torch.zeros(1)).item() == 5 + 4
