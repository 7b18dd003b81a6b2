"""The schedule of a graph that needs the fewest bytes, found without a timing: the same in every process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from torch import nn

from mucudnn.core.config import Config
from mucudnn.core.errors import MucudnnError, first_line, raise_interruption
from mucudnn.graph.candidates import band_rows, runs_bands
from mucudnn.graph.capture import NotCapturedError, capture
from mucudnn.graph.costed import CostedGraph, solver_graph
from mucudnn.graph.costs import estimated_costs, operator_costs
from mucudnn.graph.operators.convolution import Convolution
from mucudnn.graph.operators.operator import Captured
from mucudnn.graph.schedule import Schedule
from mucudnn.kernels import registry
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.solver.bands import Costs
from mucudnn.solver.plans import Plan, closer, plans
from mucudnn.solver.recompute import orders_within

# Of a budget or goal that plans which recompute may need: overlaps make arenas larger than predicted.
ARENA_SHARE = 0.85
FAST_ENOUGH = 1.05  # of the fastest time without a budget: slower plans are compared with recomputation
_LEAST_PLANS = 3  # with the least predicted memory, of which the buffers are placed
_NEXT = 0.9  # of the bytes of a schedule: the goal of the next one, which recomputes more results
_MARGIN = 1.25  # predicted bytes that are further below the budget need not be counted


def counted(schedule: Schedule, arguments: tuple[Any, ...]) -> Any:
    """Run a schedule, count what it needs, and return the model's output.

    Raises ``NotCapturedError`` if the schedule fails.
    """
    try:
        return schedule.count(arguments)
    except MucudnnError:
        raise
    except Exception as error:  # torch's operators may raise anything
        raise_interruption(error)
        raise NotCapturedError(f"its graph raises {type(error).__name__}: {first_line(error)}") from error


def least_schedule(
    model: nn.Module, frames_first: Captured, config: Config, budget_bytes: int, arguments: tuple[Any, ...]
) -> tuple[Captured, Schedule]:
    """Return a schedule within the budget, or else the one that needs the fewest bytes, and its graph in order.

    Bands of volumes have some frames; or some rows of all frames, if these are estimated to be faster within the
    budget, or if frames do not fit into it.
    """
    graphs = [_with_least_costs(frames_first, config)]
    fronts = [plans(graphs[0].graph)]
    have_frames = any(len(operator.shape) == 5 and operator.rows > 1 for operator in frames_first.operators)
    if have_frames and _fastest_s(fronts[0], budget_bytes) > fronts[0][-1].time_s * FAST_ENOUGH:
        graphs.append(_with_least_costs(capture(model, arguments, puts_rows_first=True), config))
        fronts.append(plans(graphs[1].graph))
    fastest_first = sorted(range(len(graphs)), key=lambda number: _fastest_s(fronts[number], budget_bytes))
    schedules: dict[int, Schedule] = {}
    for number in fastest_first:
        schedules[number] = _leanest(graphs[number], fronts[number], budget_bytes, arguments)
        if schedules[number].needed_bytes <= budget_bytes:
            break
    least = min(schedules, key=lambda number: (schedules[number].needed_bytes, number))
    return graphs[least].captured, schedules[least]


def comfortable_bytes(captured: Captured, config: Config) -> int:
    """Estimate the bytes with which a graph in bands is about as fast as without a budget."""
    front = plans(_with_least_costs(captured, config).graph)
    enough_s = front[-1].time_s * FAST_ENOUGH
    return int(min(plan.memory_bytes for plan in front if plan.time_s <= enough_s) / ARENA_SHARE)


def _fastest_s(front: tuple[Plan, ...], budget_bytes: int) -> float:
    """Return the estimated seconds of the fastest plan within the budget, or infinity."""
    within = (plan.time_s for plan in front if plan.memory_bytes <= budget_bytes * ARENA_SHARE)
    return min(within, default=inf)


def _leanest(costed: CostedGraph, front: tuple[Plan, ...], budget_bytes: int, arguments: tuple[Any, ...]) -> Schedule:
    """Return a schedule within the budget; if there is none, the one that needs the fewest bytes.

    It depends on the graph, on the bytes that algorithms and torch's operators need on this kind of machine, and on the
    algorithms and the cache budget of the config. What it needs is counted by running it, if it is near the budget.

    front: all plans worth having that recompute nothing.
    """
    best = Schedule(costed, front[0])
    if best.needed_bytes * _MARGIN <= budget_bytes:
        return best
    best = _placed(costed, front)
    if best.needed_bytes * _MARGIN > budget_bytes:
        counted(best, arguments)
    while best.needed_bytes > budget_bytes:
        goal = int(best.needed_bytes * _NEXT)
        orders = list(orders_within(costed.graph, int(goal * ARENA_SHARE), inf))
        if not orders:
            break
        recomputing = costed.in_order(orders[-1])
        leaner = _placed(recomputing, plans(recomputing.graph))
        if leaner.needed_bytes < best.needed_bytes:
            counted(leaner, arguments)
        if leaner.needed_bytes >= best.needed_bytes:
            break
        best = leaner
    return best


def _placed(costed: CostedGraph, front: tuple[Plan, ...]) -> Schedule:
    """Return the schedule that needs the fewest bytes, of the plans with the least memory."""
    least = front[:_LEAST_PLANS]
    tried = dict.fromkeys([*least, *(closer(costed.graph, plan) for plan in least)])
    schedules = [Schedule(costed, plan, limit_bytes=0) for plan in tried]
    return min(schedules, key=lambda schedule: schedule.needed_bytes)


def _with_least_costs(captured: Captured, config: Config) -> CostedGraph:
    """Return a graph with the bytes of its operators, in which each convolution has the leanest of ours, or torch's.

    Ours are the algorithms that run bands, and add up the same products as torch's own: no errors are measured here.
    Seconds are those of a made-up processor.
    """
    keeps_filters = config.cache_budget_bytes is None
    known: dict[str, Costs] = {}
    costs: dict[int, tuple[Costs, ...]] = {}
    algorithms: dict[int, tuple[Algorithm | None, ...]] = {}
    for index, operator in enumerate(captured.operators):
        estimated = estimated_costs(operator)
        torchs = replace(operator_costs(captured, index, None, known), call_s=estimated.call_s, row_s=estimated.row_s)
        costs[index] = (torchs,)
        if isinstance(operator, Convolution):
            leanest: tuple[Costs, Algorithm | None] = min(
                _exact(operator, config, estimated, keeps_filters=keeps_filters),
                key=lambda choice: choice[0].prepared_bytes + choice[0].scratch_bytes,
                default=(torchs, None),
            )
            costs[index] = leanest[0], torchs
            algorithms[index] = leanest[1], None
    kept = frozenset(algorithms) if keeps_filters else frozenset[int]()
    return CostedGraph(captured, solver_graph(captured, costs), algorithms, algorithms, kept=kept)


def _exact(
    convolution: Convolution, config: Config, estimated: Costs, *, keeps_filters: bool
) -> Iterator[tuple[Costs, Algorithm]]:
    """Yield the algorithms of ours that run bands of a convolution, with their bytes."""
    for algorithm in registry.algorithms():
        if config.algorithms is not None and algorithm.name not in config.algorithms:
            continue
        runs = not algorithm.is_last_resort and runs_bands(algorithm.name, convolution.problem)
        if runs and algorithm.is_local(convolution.problem):
            prepared = 0 if keeps_filters else convolution.prepared_bytes(algorithm)
            scratch = convolution.scratch_bytes(algorithm, band_rows(convolution))
            yield replace(estimated, scratch_bytes=scratch, prepared_bytes=prepared), algorithm
