"""Models that run as graphs, without being tuned."""

from __future__ import annotations

from typing import Any

from torch import nn

from mucudnn.graph.capture import capture
from mucudnn.graph.costed import CostedGraph, each_by_itself, solver_graph
from mucudnn.graph.model import BandedModel, Graphs, banded, signature_of
from mucudnn.graph.schedule import Schedule


def graph_of(model: nn.Module, *arguments: Any) -> BandedModel:
    """Return a model that runs as a graph, without being tuned."""
    captured = capture(model.eval(), arguments)
    costed = CostedGraph(captured, solver_graph(captured))
    return banded(Graphs(model, {signature_of(arguments): Schedule(costed, each_by_itself(costed.graph))}))
