"""Random models in bands of rows: exact, within the predicted bytes, and the same bits for any number of bands."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from random import Random
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mucudnn.graph import steps
from mucudnn.graph.capture import capture
from mucudnn.graph.costs import every_cost
from mucudnn.graph.model import BandedModel, signature_of
from mucudnn.graph.operators import Captured, Local
from mucudnn.graph.schedule import Schedule, solver_graph
from mucudnn.graph.windows import Choice, Convolution
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.kernels.registry import algorithms
from mucudnn.running.workspace import release_workspaces
from mucudnn.solver.bands import Costs, Graph
from mucudnn.solver.plans import Plan, plans
from mucudnn.solver.recompute import in_order, orders_within
from tests.support.effort import how_many
from tests.support.model_changes import MODEL_CHANGES
from tests.support.random_models import random_model

SEEDS = how_many(6, 1000)


def choose_algorithms(captured: Captured, random: Random, *, ours: bool) -> dict[int, tuple[Costs, ...]]:
    """Let each convolution run a random algorithm without transforms; return the costs of those that are ours."""
    known = {}
    for index, one in enumerate(captured.operators):
        if not isinstance(one, Convolution):
            continue
        offered = [
            algorithm
            for algorithm in algorithms()
            if algorithm.supports(one.problem) is None
            and not algorithm.name.startswith("winograd")
            and algorithm.band(one.problem, 1, (one.problem.h, one.problem.y_shape(1)[2]), one.problem.padding[0])
        ]
        chosen = random.choice(offered) if offered and ours else None
        one.choices = (Choice(chosen, chosen),)
        one.keeps = random.random() < 0.3
        if chosen is not None:
            workspace = chosen.workspace(one.problem, captured.samples)
            prepared = 0 if one.keeps else workspace.prepared_bytes
            known[index] = (Costs(1e-6, 1e-6, 1e-6, workspace.scratch_bytes, 0, prepared),)
    return known


def some_plans(front: tuple[Plan, ...], random: Random) -> list[Plan]:
    """Return the plan with the least memory, the fastest, and a random one."""
    return [front[0], front[-1], random.choice(front)]


def recomputing_schedules(captured: Captured, graph: Graph, random: Random) -> Iterator[Schedule]:
    """Yield schedules, placed by the integer program, that recompute what the solver chooses, and a random result."""
    budget = random.choice(plans(graph)).memory_bytes // 2
    orders = list(orders_within(graph, budget, 0.0))[-1:]
    rows = [i for i in graph.may_be_overwritten if any(reach for _, reach in graph.readers[i])]
    if rows:
        index = random.choice(rows)
        before = random.choice([reader for reader, reach in graph.readers[index] if reach])
        orders.append((*range(before), index, *range(before, len(graph))))
    for order in orders:
        of_order = in_order(graph, order)
        yield Schedule(captured.in_order(order), of_order, random.choice(plans(of_order)), 0)


def uses_vectors(captured: Captured) -> bool:
    """Return whether torch computes an exponential, whose bits depend on where its vectors begin."""
    return any("gelu" in str(one.target) for one in captured.operators if isinstance(one, Local))


def peak_beside(found: list[Tensor], call: Callable[[], object]) -> int:
    """Return the peak bytes that a call allocates, beside the tensors that it puts into ``found``."""
    release_workspaces()
    return peak_allocated_bytes(lambda: found.extend(tree_leaves(call()))) - sum(one.nbytes for one in found)


def check(seed: int, *, ours: bool) -> None:
    """Check a random model with our algorithms and steps in C++; or only by torch's operators, as on other devices."""
    with nullcontext() if ours else mock.patch.object(steps, "is_available", return_value=False):
        _check(seed, ours=ours)


def _check(seed: int, *, ours: bool) -> None:
    model, x = random_model(seed)
    random = Random(seed)
    captured = capture(model, (x,))
    known = choose_algorithms(captured, random, ours=ours)
    graph = solver_graph(captured, every_cost(captured, None, known))
    with torch.no_grad():
        expected, torchs = copy.deepcopy(model).double()(x.double()), model(x)
    schedules = [Schedule(captured, graph, plan) for plan in some_plans(plans(graph), random)]
    schedules += recomputing_schedules(captured, graph, random)
    earlier: list[Tensor] | None = None
    for schedule in schedules:
        plan = schedule.plan
        schedule.count((torch.zeros_like(x),))
        found: list[Tensor] = []
        assert peak_beside(found, partial(schedule.run, (x,))) <= schedule.needed_bytes, f"seed {seed}, {plan}"
        for own, exact, of_torch in zip(found, expected, torchs, strict=True):
            assert own.shape == of_torch.shape, f"seed {seed}"
            assert own.is_contiguous() or not (of_torch.is_contiguous() and x.is_contiguous()), f"seed {seed}"
            scale = exact.abs().max().item() + 1e-3
            error, torchs_error = ((one - exact).abs().max().item() / scale for one in (own, of_torch))
            # Normalization of few, nearly equal numbers amplifies rounding, by another factor in each implementation.
            assert error <= max(4 * torchs_error, 3e-6), f"seed {seed}, {plan}"
        if ours and steps.is_available() and earlier is not None and not uses_vectors(captured):
            assert all(map(torch.equal, found, earlier)), f"seed {seed}: bits depend on the bands, {plan}"
        earlier = found


def check_change(seed: int) -> None:
    """Change a random model at random between two calls of its graph, or a result: the next call gives the model's."""
    model, x = random_model(seed)
    random = Random(seed)
    captured = capture(model, (x,))
    known = choose_algorithms(captured, random, ours=random.random() < 0.5)
    graph = solver_graph(captured, {i: known.get(i, (Costs(row_s=1e-6),)) for i in range(len(captured.operators))})
    schedule = Schedule(captured, graph, random.choice(plans(graph)))
    fitted = BandedModel(model, {signature_of((x,)): schedule})
    name = random.choice([*MODEL_CHANGES, "result"]) if [*model.parameters()] else "number"
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = fitted(x)
        assert not caught, f"seed {seed}"
        if name == "result":
            expected, given = [one.clone() for one in first], x.clone()
            for one in first:
                one.normal_()
            assert torch.equal(x, given), f"seed {seed}"
        else:
            MODEL_CHANGES[name](model, random)
            torch.manual_seed(seed)
            expected = model(x)
        torch.manual_seed(seed)
        found = fitted(x)
    assert all(map(torch.equal, found, expected)), f"seed {seed}, {name}"
    assert len([one for one in caught if "runs as it was" in str(one.message)]) == (name != "result"), f"{seed}, {name}"


@pytest.mark.parametrize("ours", [True, False])
def test_random_models(ours: bool) -> None:
    for seed in (*range(SEEDS), 2840):  # in which padding alone is above a convolution of one pixel
        check(seed, ours=ours)


def test_random_changes_of_random_models() -> None:
    for seed in range(5_000, 5_000 + how_many(15, 1000)):
        check_change(seed)
