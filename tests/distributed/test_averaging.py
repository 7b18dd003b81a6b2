"""Synchronous model averaging on real ranks, against its definition in float64, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks.group import Ranks, group_of_one
from torch import Tensor, nn

from mucudnn.core.errors import InvalidInputError
from mucudnn.distributed import SynchronousModelAveraging

RATE, STEPS = 0.02, 7
Array = np.ndarray[Any, Any]


def task(rank: int) -> tuple[Tensor, Tensor, nn.Module]:
    """Images and targets of a rank, and its own model to start from."""
    generator = torch.Generator().manual_seed(rank)
    x, y, weight, bias = (torch.randn(*s, generator=generator).double() for s in ((5, 3), (5, 2), (2, 3), (2,)))
    model = nn.Linear(3, 2).double()
    model.load_state_dict({"weight": weight, "bias": bias})
    model.register_parameter("frozen", nn.Parameter(torch.full((4,), float(rank)), requires_grad=False))
    return x, y, model


def flat(tensors: Any) -> list[float]:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()


def train(rank: int, restart_after: int, settings: Mapping[str, Any]) -> list[tuple[list[float], list[float]]]:
    """Parameters and average after each step of ``PostLocalSGDOptimizer``."""
    from torch.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

    x, y, model = task(rank)
    averager = SynchronousModelAveraging(**settings)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), RATE), averager)
    seen = []
    for number in range(1, STEPS + 1):
        optimizer.zero_grad()
        ((model(x) - y).square().sum() / 2).backward()
        optimizer.step()  # type: ignore[no-untyped-call]
        if number == restart_after:
            averager.restart(model.parameters())
        assert averager.step == number
        assert model.frozen.tolist() == [float(rank)] * 4
        seen.append((flat([model.weight, model.bias]), flat(averager.average) if averager.average else []))
    return seen


def by_definition(
    ranks: int, restart_after: int, period: int, warmup_steps: int, alpha: float, momentum: float
) -> Iterator[tuple[list[Array], Array | None]]:
    """Parameters of all learners and their average after each step, by algorithm 1 of the paper."""
    tasks = [task(rank) for rank in range(ranks)]
    w = [np.array(flat([model.weight, model.bias])) for _, _, model in tasks]
    z: Array | None = None
    before: Array | None = None
    for number in range(STEPS):
        steps = []
        for (x, y, _), of_learner in zip(tasks, w, strict=True):
            errors = x.numpy() @ of_learner[:6].reshape(2, 3).T + of_learner[6:] - y.numpy()
            steps.append(RATE * np.concatenate([(errors.T @ x.numpy()).ravel(), errors.sum(0)]))
        if number < warmup_steps or (number - warmup_steps) % period or z is None or before is None:
            w = [of_learner - step for of_learner, step in zip(w, steps, strict=True)]
            if number == warmup_steps:
                z = before = sum(w) / ranks
        else:
            corrections = [alpha * (of_learner - z) for of_learner in w]
            w = [of_learner - step - c for of_learner, step, c in zip(w, steps, corrections, strict=True)]
            z, before = z + sum(corrections) + momentum * (z - before), z
        if number + 1 == restart_after and z is not None:
            w, before = [z.copy() for _ in w], z
        yield w, z


def test_learners_and_average_move_as_defined(ranks: Mapping[int, Ranks]) -> None:
    for size, period, warmup_steps, alpha, momentum, restart_after in (
        (2, 1, 0, 0.5, 0.9, 0),
        (3, 1, 2, 0.25, 0.0, 0),
        (3, 2, 1, 0.6, 0.5, 4),
        (2, 3, 0, 0.1, 0.7, 3),
    ):
        settings = {"period": period, "warmup_steps": warmup_steps, "alpha": alpha, "momentum": momentum}
        seen = ranks[size].run(train, restart_after, settings)
        for number, (w, z) in enumerate(by_definition(size, restart_after, **settings)):
            for rank, learner in enumerate(seen):
                parameters, average = learner[number]
                assert parameters == pytest.approx(w[rank], rel=1e-12, abs=1e-12), (settings, number)
                assert average == (pytest.approx(z, rel=1e-12, abs=1e-12) if z is not None else []), (settings, number)
                assert average == seen[0][number][1], "to the bit"
            if number < warmup_steps:
                assert z is None


def test_a_share_of_one_learner_is_the_default(ranks: Mapping[int, Ranks]) -> None:
    assert ranks[3].run(train, 0, {}) == ranks[3].run(train, 0, {"alpha": 1 / 3, "momentum": 0.9})


@pytest.fixture
def one_rank() -> Iterator[None]:
    with group_of_one():
        yield


def test_filters_keep_their_memory_format_and_groups_may_be_several(one_rank: None) -> None:
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    groups: list[dict[str, Any]] = [{"params": [convolution.weight]}, {"params": [convolution.bias]}]
    averager = SynchronousModelAveraging(alpha=0.5)
    start = convolution.weight.detach().clone()
    averager.average_parameters(groups)
    with torch.no_grad():
        convolution.weight += 1
    averager._learner += 1  # type: ignore[operator]  # as if that step was the one before
    averager.average_parameters(groups)
    assert torch.allclose(convolution.weight, start + 0.5)
    assert torch.allclose(averager.average[0], start + 0.5)
    assert [average.shape for average in averager.average] == [(4, 3, 3, 3), (4,)]
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


def diverges(learners: int, alpha: float, momentum: float) -> bool:
    """Whether the distance to the average grows without gradients, by the definition."""
    w, z, before = np.linspace(1.0, 2.0, learners), 0.0, 0.0
    distances = []
    for _ in range(200):
        corrections = alpha * (w - z)
        w, z, before = w - corrections, z + corrections.sum() + momentum * (z - before), z
        distances.append(np.hypot(z - before, w.mean() - z))
    return bool(distances[-1] > distances[0])


def test_what_is_out_of_range_is_refused(one_rank: None) -> None:
    for wrong in (
        *({"alpha": alpha} for alpha in (0, -0.1, float("nan"), float("inf"), "half", 1.4)),
        *({"momentum": momentum} for momentum in (-0.1, 1, 1.5, None)),
        *({"period": 0}, {"period": 1.5}, {"warmup_steps": -1}, {"process_group": "all"}),
    ):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            SynchronousModelAveraging(**wrong)  # type: ignore[arg-type]
    averager = SynchronousModelAveraging()
    averager.average_parameters([nn.Parameter(torch.zeros(2))])
    with pytest.raises(InvalidInputError, match="3 elements that require a gradient, and the average has 2"):
        averager.average_parameters([nn.Parameter(torch.zeros(3))])


def refused_from(rank: int, momentum: float, alphas: list[float]) -> list[float]:
    refused = []
    for alpha in alphas:
        try:
            SynchronousModelAveraging(alpha=alpha, momentum=momentum)
        except InvalidInputError:
            refused.append(alpha)
    return refused


def test_the_largest_share_is_that_at_which_learners_would_diverge(ranks: Mapping[int, Ranks]) -> None:
    for size, momentum in ((2, 0.0), (3, 0.5), (3, 0.9)):
        alphas = [0.05 * number for number in range(1, 40)]
        (refused, *_) = ranks[size].run(refused_from, momentum, alphas)
        assert refused == [alpha for alpha in alphas if diverges(size, alpha, momentum)]


def test_it_needs_a_process_group() -> None:
    with pytest.raises(InvalidInputError, match="init_process_group"):
        SynchronousModelAveraging()
