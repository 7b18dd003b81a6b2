"""The schedule of a graph that needs the fewest bytes, found without a timing: the same in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem
from mucudnn.graph.convolution import Choice, Convolution
from mucudnn.graph.convolution_choices import BAND_ROWS, runs_bands, scratch_bytes
from mucudnn.graph.costs import estimated_costs, key_of, operator_costs
from mucudnn.graph.operators import Captured
from mucudnn.graph.schedule import Schedule, solver_graph
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.registry import algorithms
from mucudnn.solver.bands import Costs, Graph
from mucudnn.solver.plans import plans
from mucudnn.solver.recompute import in_order, orders_within

_PLANS = 3  # with the least predicted memory, of which the buffers are placed
_NEXT = 0.9  # of the bytes of a schedule: the goal of the next one, which recomputes more results
_ARENA_SHARE = 0.85  # of a goal that plans which recompute may need: overlaps make arenas larger than predicted
_MARGIN = 1.25  # predicted bytes that are further below the budget need not be counted


def leanest(captured: Captured, config: Config, budget_bytes: int, count: Callable[[Schedule], None]) -> Schedule:
    """Return a schedule within the budget; if there is none, the one that needs the fewest bytes.

    It depends on the graph, on the bytes that algorithms and torch's operators need on this kind of machine, and on the
    algorithms and the cache budget of the config. count: counts what a schedule needs, by running it.
    """
    captured = captured.in_order(range(len(captured.operators)))  # whose operators have other choices
    graph = solver_graph(captured, _costs(captured, config), {})
    best = _least(captured, graph)
    if best.needed_bytes * _MARGIN > budget_bytes:
        count(best)
    while best.needed_bytes > budget_bytes:
        goal = int(best.needed_bytes * _NEXT)
        orders = list(orders_within(graph, int(goal * _ARENA_SHARE), inf))
        found = _least(captured.in_order(orders[-1]), in_order(graph, orders[-1])) if orders else best
        if found.needed_bytes < best.needed_bytes:
            count(found)
        if found.needed_bytes >= best.needed_bytes:
            break
        best = found
    return best


def _least(captured: Captured, graph: Graph) -> Schedule:
    schedules = (Schedule(captured, graph, plan, 0) for plan in plans(graph)[:_PLANS])
    return min(schedules, key=lambda one: one.needed_bytes)


def _costs(captured: Captured, config: Config) -> dict[int, tuple[Costs, ...]]:
    """Return the bytes of all operators, after each convolution has its two leanest choices: one of ours, and torch's.

    Seconds are those of a made-up processor.
    """
    known: dict[str, Costs] = {}
    costs: dict[int, tuple[Costs, ...]] = {}
    for index, one in enumerate(captured.operators):
        key = key_of(captured, index)
        if key not in known:
            known[key] = operator_costs(captured, index, None)
        made_up = estimated_costs(one)
        own = replace(known[key], call_s=made_up.call_s, row_s=made_up.row_s)
        costs[index] = (own,)
        if isinstance(one, Convolution):
            one.keeps = config.cache_budget_bytes is None
            offered = [(_buffers(one, algorithm, own), algorithm) for algorithm in _offered(one.problem, config)]
            ours = min(offered, key=lambda of: of[0].prepared_bytes + of[0].scratch_bytes, default=(own, None))
            one.choices = Choice(ours[1], ours[1]), Choice()
            costs[index] = ours[0], own
    return costs


def _offered(problem: ConvProblem, config: Config) -> Iterator[Algorithm]:
    """Yield the algorithms that run bands, and add up the same products as torch's own: no errors are measured here."""
    for one in algorithms():
        is_named = config.algorithms is None or one.name in config.algorithms
        if is_named and not one.is_last_resort and runs_bands(one.name, problem) and one.is_local(problem):
            yield one


def _buffers(one: Convolution, algorithm: Algorithm, own: Costs) -> Costs:
    """Return the costs of an algorithm. own: those of torch's."""
    prepared = 0 if one.keeps else algorithm.workspace(one.problem, 1).prepared_bytes
    scratch = scratch_bytes(one, algorithm, min(BAND_ROWS, one.rows))
    return Costs(own.call_s, own.row_s, scratch_bytes=scratch, prepared_bytes=prepared)
