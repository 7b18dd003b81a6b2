"""The ranks of a tuning where there is one, and how long its tasks are expected to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from mucudnn.tuning.job import Job
from mucudnn.words.problem import ConvProblem

# To measure a problem quickly on one core, all candidates and samples together (AlexNet and MobileNetV2, torch 2.13,
# Intel Xeon 2.50 GHz). Only the ratios count: they say how much longer a large convolution takes than a small one.
_OVERHEAD_S = 0.3
_FLOPS_PER_S = 5e9
_BYTES_PER_S = 35e6


class Alone:
    """The ranks of a tuning, of which this one is the only one."""

    are_several = False

    def own(self, jobs: Sequence[Job], cost: Callable[[Job], float]) -> Sequence[Job]:
        """Return the tasks that are measured here. cost: expected one of a task, in any unit."""
        return jobs

    def exchange(self, jobs: Sequence[Job]) -> None:
        """Tell the ranks of this kind what was found out here, and learn what they did."""

    def everywhere(self, holds: bool) -> bool:
        """Return whether something holds on all ranks, of any kind: so that they go on alike."""
        return holds


def expected_s(problem: ConvProblem, batch_size: int) -> float:
    """Estimate how long a problem takes to measure, from its arithmetic and its tensors; compare it with others'."""
    shapes = problem.x_shape(batch_size), problem.w_shape(), problem.y_shape(batch_size)
    moved_bytes = problem.item_bytes * sum(map(prod, shapes))
    return _OVERHEAD_S + problem.flops(batch_size) / _FLOPS_PER_S + moved_bytes / _BYTES_PER_S
