"""A device made up of known times: its tuning, its steps, and predictions of them."""

from __future__ import annotations

from support.problems.made_up_sweeps import layer, powers, tuning

from mucudnn.bench.scaling.local_batches import local_batches
from mucudnn.bench.scaling.prediction import Cluster, Device, ScaleResult, predict_from
from mucudnn.bench.scaling.steps import MeasuredStep, MeasuredSteps
from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.words.communication import AllReduce, Link

UP_TO = 8
MIB = 2**20
GRADIENTS = (("last", MIB), ("middle", 40 * MIB), ("first", 3 * MIB))
RING = Cluster(Link(1e-5, 1e9), AllReduce.RING)


def made_up_tuning() -> TableTuning:
    """Torch takes 4 + n ms for n samples, another algorithm n ms for two and more, twice in a network."""
    torchs = powers("native", UP_TO, lambda n: 4.0 + n)
    return tuning(layer(torchs + powers("quick", UP_TO, lambda n: 9.0 if n == 1 else 1.0 * n), UP_TO, count=2))


def made_up_steps() -> MeasuredSteps:
    """Steps of torch whose rest is 10 + 2 n ms; a tenth of them is the optimizer."""
    parts = (0.5, 0.6, 0.9)
    steps = [MeasuredStep(n, (2 * (4 + n) + 10 + 2 * n) / 1e3, parts, 0.9) for n in (1, 4, UP_TO)]
    return MeasuredSteps(GRADIENTS, tuple(steps))


def made_up_device(largest: int = 32) -> Device:
    return Device(local_batches(made_up_tuning(), UP_TO, largest), made_up_steps())


def made_up_result(cluster: Cluster = RING) -> ScaleResult:
    tuned, steps = made_up_tuning(), made_up_steps()
    return predict_from(tuned, (steps, None), cluster, (1, 2, 4, 64), up_to=UP_TO, batch=32, local_batch=UP_TO)
