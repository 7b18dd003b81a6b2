"""Algorithms chosen again in the bands of a schedule."""

from __future__ import annotations

from math import inf
from typing import Any
from unittest import mock

import pytest
import torch
from support.clock.machine import FakeClock, fake_machine

from mucudnn.bench.sources.networks.large_images import DnCNN
from mucudnn.core.config import Config
from mucudnn.core.terminal import silent
from mucudnn.graph.capture import capture
from mucudnn.graph.convolution_choices import refined
from mucudnn.graph.costs import Timings, every_cost
from mucudnn.graph.schedule import Schedule, solver_graph
from mucudnn.graph.windows import AlgorithmPair, Convolution
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.registry import algorithm
from mucudnn.solver.bands import Cut, Segment
from mucudnn.solver.plans import Plan
from mucudnn.store.database import Database


def test_each_convolution_gets_the_fastest_of_the_candidates() -> None:
    if reason := loaded_build().why_not_compiled:
        pytest.skip(f"only compiled algorithms run bands: {reason}")
    model, x = DnCNN(5, 8).eval(), torch.randn(1, 1, 24, 20)
    captured = capture(model, (x,))
    convolutions = {i: one for i, one in enumerate(captured.operators) if isinstance(one, Convolution)}
    first, second = algorithm("implicit-gemm"), algorithm("winograd-4x4")
    for one in convolutions.values():
        one.pairs, one.keeps = (AlgorithmPair(first, first),), True
    graph = solver_graph(captured, every_cost(captured, None, {}), {})
    segments = (Segment(0, 1, Cut(1, 1)), Segment(1, len(graph), Cut(1, 3)))
    schedule = Schedule(captured, graph, Plan(0, 0.0, segments))
    problems = dict.fromkeys(one.problem for one in convolutions.values())
    slower = {problem: number % 2 == 0 for number, problem in enumerate(problems)}  # by the second algorithm

    def operator_times(self: Schedule, arguments: tuple[Any, ...]) -> dict[int, float]:
        used = {index: one.algorithm(self.plan.segments[-1].cut) for index, one in convolutions.items()}
        return {i: 2.0 if used[i] is first else 3.0 if slower[one.problem] else 1.0 for i, one in convolutions.items()}

    candidates = dict.fromkeys(convolutions, (first, second))
    without_room = [index for index, one in convolutions.items() if one.problem.c == one.problem.k][1]
    candidates[without_room] = (first,)  # the cache has no room for the other one's filter
    machine = fake_machine(FakeClock(), [])
    with mock.patch.object(Schedule, "operator_times", operator_times):
        found, unchanged = (
            refined(schedule, candidates, (x,), seconds, Timings(machine, Database(":memory:"), Config(), silent))
            for seconds in (inf, 0)
        )
    cut = found.plan.segments[-1].cut
    assert {slower[one.problem] for one in convolutions.values()} == {True, False}
    for index, one in convolutions.items():
        assert one.algorithm(cut) is (first if slower[one.problem] or index == without_room else second)
        assert one.algorithm(segments[-1].cut) is first, "of the schedule itself"
    assert unchanged is schedule
    expected = schedule.run((x,))
    assert torch.allclose(found.run((x,)), expected, rtol=1e-4, atol=1e-5)
    found.forget_other_filters()
    for one in convolutions.values():
        assert {*one._kept} == {one.algorithm(cut).name}
    assert torch.allclose(found.run((x,)), expected, rtol=1e-4, atol=1e-5)
