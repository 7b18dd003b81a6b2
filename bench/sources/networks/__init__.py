"""Published networks in plain torch: one file for each kind, and the registry that knows them by name.

What lives here: how each is built, what it reads, and what it is trained for. Geometry and numbers of parameters are
those of torchvision, or of the paper where torchvision has none or another. Nothing is tuned, timed or printed here.
"""

from __future__ import annotations

from mucudnn.bench.sources.networks.blocks import Branches, Residual
from mucudnn.bench.sources.networks.objectives import Objective
from mucudnn.bench.sources.networks.registry import (
    INPUT_SHAPE,
    NETWORKS,
    Network,
    arguments_for,
    build,
    did_you_mean,
    input_shape_of,
    objective_for,
)

__all__ = [
    "INPUT_SHAPE",
    "NETWORKS",
    "Branches",
    "Network",
    "Objective",
    "Residual",
    "arguments_for",
    "build",
    "did_you_mean",
    "input_shape_of",
    "objective_for",
]
