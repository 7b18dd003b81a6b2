"""Expected times of an algorithm before its first run, from similar problems that this machine has measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf, log2, prod
from typing import Any, NamedTuple

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Failure, Measurement, MicroConfig
from mucudnn.core.torch_settings import TORCHS_OWN

_NEIGHBOURS = 3
_REACH = 4.0  # limit on the distance: sum of the log2 ratios of channels and pixels
# Number of neighbours -> multiple of the fastest in each of them above which an algorithm is hopeless. One neighbour
# is not enough: a single disturbed measurement must not rule out an algorithm for all similar problems.
_HOPELESS_IN_LIKE = {2: 1.6, 3: 1.35}
_HOPELESS_ELSEWHERE = 4.0  # the same for neighbours with another operation

_Class = tuple[Any, ...]
_Place = tuple[float, float, float]


class Expectation(NamedTuple):
    """Expected time of an algorithm: ``ratio``, its lowest multiple of the fastest algorithm's time nearby.

    The ratio is taken from similar problems.

    hopeless: the ratio above which the algorithm is not worth a run.
    """

    ratio: float
    hopeless: float


class Prior:
    """Times of algorithms on measured problems, as multiples of the fastest algorithm's time.

    Similar problems have the same operation, filter size, stride, dilation, kind of groups, dtype and memory format,
    and nearly as many channels and pixels.
    """

    def __init__(self) -> None:
        self._known: dict[_Class, dict[_Place, Mapping[str, float]]] = defaultdict(dict)

    def learn(self, problem: ConvProblem, results: Iterable[Measurement | Failure]) -> None:
        """Add the results of a problem; they replace its earlier ones. Failures count if they were too slow to measure.

        Setup times are divided by the largest micro-batch, even for algorithms that were dropped after a run on a small
        part of the mini-batch. Where torch's own was measured at a smaller size, too, algorithms are compared at it.
        """
        timed = [r for r in results if isinstance(r, Measurement) or r.least_s is not None]
        largest = max((r.micro_config.micro_batch_size for r in timed), default=1)
        per_sample_s: dict[MicroConfig, float] = {}
        for r in timed:
            if isinstance(r, Measurement):
                per_sample_s[r.micro_config] = r.setup_s / largest + r.step_s / r.micro_config.micro_batch_size
            else:
                per_sample_s[r.micro_config] = (r.least_s or 0.0) / largest
        least_s, ratios = min(per_sample_s.values(), default=0.0), dict[str, float]()
        for measured, seconds in per_sample_s.items():
            fastest_s, name, size = least_s, measured.algorithm, measured.micro_batch_size
            if size < largest and MicroConfig(TORCHS_OWN, size) in per_sample_s:
                fastest_s = min(s for beside, s in per_sample_s.items() if beside.micro_batch_size == size)
            ratios[name] = min(seconds / fastest_s, ratios.get(name, inf))
        if len(ratios) > 1:
            self._known[_class(problem)][_place(problem)] = ratios

    def expected(self, problem: ConvProblem, algorithm: str) -> Expectation | None:
        """Return the expectation for an algorithm from similar problems, else from other operations; None if unknown.

        Other operations differ too much to show more than that an algorithm is hopeless.
        """
        expectation = self._near(problem, algorithm)
        if expectation is not None:
            return expectation
        elsewhere = (problem.with_operation(operation) for operation in Operation if operation is not problem.operation)
        expectations = (self._near(similar, algorithm) for similar in elsewhere)
        lowest = min((expected.ratio for expected in expectations if expected), default=0.0)
        return Expectation(lowest, _HOPELESS_ELSEWHERE) if lowest > _HOPELESS_ELSEWHERE else None

    def _near(self, problem: ConvProblem, algorithm: str) -> Expectation | None:
        here = _place(problem)
        by_distance = sorted(
            (sum(abs(a - b) for a, b in zip(here, place, strict=True)), ratios[algorithm])
            for place, ratios in self._known.get(_class(problem), {}).items()
            if algorithm in ratios
        )
        near = [ratio for distance, ratio in by_distance[:_NEIGHBOURS] if distance <= _REACH]
        return Expectation(min(near), _HOPELESS_IN_LIKE[len(near)]) if len(near) in _HOPELESS_IN_LIKE else None


def _class(problem: ConvProblem) -> _Class:
    grouped = "dense" if problem.groups == 1 else "depthwise" if problem.groups == problem.c else "grouped"
    filter_and_steps = (problem.window, problem.stride, problem.dilation)
    return problem.operation, *filter_and_steps, grouped, problem.dtype, problem.memory_format


def _place(problem: ConvProblem) -> _Place:
    return log2(problem.c), log2(problem.k), log2(prod(problem.positions))
