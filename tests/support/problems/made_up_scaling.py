"""A device made up of known steps, and predictions of them."""

from __future__ import annotations

from mucudnn.bench.results.variants import Variant
from mucudnn.bench.suites.scaling import MeasuredStep, MeasuredSteps, Point, predict
from mucudnn.solver.all_reduce import AllReduce, Link

UP_TO, BATCH, RANKS = 8, 32, (1, 2, 4, 64)
MIB = 2**20
GRADIENTS = (MIB, 40 * MIB, 3 * MIB)  # bytes, the last layer's first
LINK = Link(1e-5, 1e9)


def made_up_device() -> MeasuredSteps:
    """Steps of 20 + 4 n ms with PyTorch's convolutions, of 10 + 4 n with ours; a tenth of them is the optimizer."""
    steps = {
        which: tuple(MeasuredStep(n, (before_ms + 4 * n) / 1e3, (0.5, 0.6, 0.9), 0.9) for n in (1, 4, UP_TO))
        for which, before_ms in ((Variant.TORCH, 20), (Variant.MUCUDNN, 10))
    }
    return MeasuredSteps(GRADIENTS, steps)


def made_up_points() -> list[Point]:
    return [*predict(made_up_device(), LINK, AllReduce.RING, RANKS, batch=BATCH, local_batch=UP_TO)]
