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
from mucudnn.graph.candidates import refined
from mucudnn.graph.capture import capture
from mucudnn.graph.costed import CostedGraph, solver_graph
from mucudnn.graph.costs import every_cost
from mucudnn.graph.operators.convolution import convolutions_of
from mucudnn.graph.schedule import Schedule
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.timings import Timings
from mucudnn.solver.bands import Cut, Segment
from mucudnn.solver.plans import Plan
from mucudnn.store.database import Database


def test_each_convolution_gets_the_fastest_of_the_candidates() -> None:
    if reason := loaded_build().why_not_compiled:
        pytest.skip(f"only compiled algorithms run bands: {reason}")
    model, x = DnCNN(5, 8).eval(), torch.randn(1, 1, 24, 20)
    captured = capture(model, (x,))
    convolutions = convolutions_of(captured.operators)
    first, second = algorithm("implicit-gemm"), algorithm("winograd-4x4")
    offered = dict.fromkeys(convolutions, (first, second))
    without_room = [index for index, one in convolutions.items() if one.problem.c == one.problem.k][1]
    offered[without_room] = (first,)  # the cache has no room for the other one's filter
    chosen = dict.fromkeys(convolutions, (first,))
    graph = solver_graph(captured, every_cost(captured, None, {}))
    costed = CostedGraph(captured, graph, chosen, chosen, offered, kept=frozenset(convolutions))
    segments = (Segment(0, 1, Cut(1, 1)), Segment(1, len(graph), Cut(1, 3)))
    schedule = Schedule(costed, Plan(0, 0.0, segments))
    problems = dict.fromkeys(one.problem for one in convolutions.values())
    slower = {problem: number % 2 == 0 for number, problem in enumerate(problems)}  # by the second algorithm

    def operator_times(self: Schedule, arguments: tuple[Any, ...]) -> dict[int, float]:
        used = self.algorithms
        return {i: 2.0 if used[i] is first else 3.0 if slower[one.problem] else 1.0 for i, one in convolutions.items()}

    machine = fake_machine(FakeClock(), [])
    with mock.patch.object(Schedule, "operator_times", operator_times):
        faster, unchanged = (
            refined(schedule, (x,), limit_bytes, Timings(machine, Database(":memory:"), Config(), silent))
            for limit_bytes in (inf, 0)
        )
    assert {slower[one.problem] for one in convolutions.values()} == {True, False}
    for index, one in convolutions.items():
        assert faster.algorithms[index] is (first if slower[one.problem] or index == without_room else second)
        assert schedule.algorithms[index] is first, "of the schedule itself"
    assert unchanged is schedule
    expected = schedule.run((x,))
    assert torch.allclose(faster.run((x,)), expected, rtol=1e-4, atol=1e-5)
    both = costed.filters.nbytes
    faster.settle(inf)
    needed = [one.prepared_bytes(faster.algorithms[index]) for index, one in convolutions.items()]
    assert costed.filters.nbytes == sum(needed) < both
    assert torch.allclose(faster.run((x,)), expected, rtol=1e-4, atol=1e-5)
