"""Graphs with the costs of their operators, and the algorithms that have these costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from mucudnn.graph.operators.convolution import Filters
from mucudnn.graph.operators.operator import Captured, Ref
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.solver import recompute
from mucudnn.solver.bands import Costs, Cut, Graph, Segment, Vertex
from mucudnn.solver.plans import Plan

Variants = Mapping[int, tuple[Algorithm | None, ...]]  # by index of a convolution; None for torch's own


@dataclass(frozen=True)
class CostedGraph:
    """A captured graph, as the solver sees it, and what computes its convolutions.

    captured: the operators.
    graph: their costs, in each variant of a segment's cut.
    whole: the algorithms of each convolution for all rows at once, one for each variant; torch's own where there are
        none, as in ``bands``.
    bands: the algorithms for bands of rows.
    offered: further algorithms of each convolution, which may turn out to be faster in the bands of a plan.
    kept: the convolutions whose prepared filters are kept between calls.
    filters: these, of all schedules.
    """

    captured: Captured
    graph: Graph
    whole: Variants = field(default_factory=dict)
    bands: Variants = field(default_factory=dict)
    offered: Mapping[int, tuple[Algorithm, ...]] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    filters: Filters = field(default_factory=Filters)

    def algorithms(self, plan: Plan) -> dict[int, Algorithm | None]:
        """Return what computes each convolution in a plan, by index."""
        chosen = {}
        for segment in plan.segments:
            variants = self.whole if segment.cut.bands == 1 else self.bands
            for index in range(segment.start, segment.stop):
                if index in variants:
                    chosen[index] = variants[index][min(segment.cut.variant, len(variants[index]) - 1)]
        return chosen

    def in_order(self, order: Sequence[int]) -> CostedGraph:
        """Return the graph that runs its operators in this order, which may have some of them more than once."""
        order = tuple(order)
        return CostedGraph(
            captured=self.captured.in_order(order),
            graph=recompute.in_order(self.graph, order),
            whole={number: self.whole[index] for number, index in enumerate(order) if index in self.whole},
            bands={number: self.bands[index] for number, index in enumerate(order) if index in self.bands},
            offered={number: self.offered[index] for number, index in enumerate(order) if index in self.offered},
            kept=frozenset(number for number, index in enumerate(order) if index in self.kept),
            filters=self.filters,
        )


def solver_graph(
    captured: Captured,
    costs: Mapping[int, tuple[Costs, ...]] = MappingProxyType({}),
    whole_costs: Mapping[int, tuple[Costs, ...]] = MappingProxyType({}),
) -> Graph:
    """Return a captured graph as the solver sees it.

    costs: of bands, by index, one for each variant; operators without cost nothing.
    whole_costs: of all rows at once, where these differ.
    """
    results = {result.index for result in captured.results if isinstance(result, Ref)}
    vertices = []
    for index, operator in enumerate(captured.operators):
        vertices.append(
            Vertex(
                reaches=operator.reaches() if operator.rows else (),
                whole=operator.wholes,
                rows=operator.rows,
                row_bytes=operator.row_bytes(),
                whole_bytes=0 if index in captured.direct_results else operator.whole_bytes(),
                costs=costs.get(index, (Costs(),)),
                whole_costs=whole_costs.get(index, ()),
                align=operator.align,
                is_result=index in results,
                aliases=operator.aliases,
            )
        )
    return Graph(vertices, captured.samples)


def each_by_itself(graph: Graph) -> Plan:
    """Return the plan that computes each operator as a whole, one after another, whose costs are not known."""
    segments = (Segment(index, index + 1, Cut(graph.samples, 1)) for index in range(len(graph)))
    return Plan(0, 0.0, tuple(segments))
