"""Expected times of an algorithm before its first run, from similar problems that this machine has measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf, log2
from typing import Any, NamedTuple

from mucudnn.measuring.thresholds import HOPELESS_ELSEWHERE, HOPELESS_IN_LIKE, NEIGHBOURS, REACH
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Measurement

_Class = tuple[Any, ...]
_Place = tuple[float, float, float]


class Expectation(NamedTuple):
    """Expectation for an algorithm before it runs: ``ratio``, its least multiple of the fastest algorithm's time.

    hopeless: the multiple above which the algorithm is not worth a run.
    """

    ratio: float
    hopeless: float


class Prior:
    """Times of algorithms, as multiples of the fastest one, by the problems on which they were measured.

    Problems are alike if they agree in operation, filter, stride, dilation, kind of groups, dtype and memory format;
    they are near if channels and pixels differ little.
    """

    def __init__(self) -> None:
        self._known: dict[_Class, dict[_Place, Mapping[str, float]]] = defaultdict(dict)

    def learn(self, problem: ConvProblem, measurements: Iterable[Measurement]) -> None:
        """Add the measurements of a problem, in place of earlier ones of it.

        The setup time is divided by the largest measured micro-batch, also for algorithms that were dropped after a run
        on a small part of the mini-batch.
        """
        measured, best = list(measurements), dict[str, float]()
        largest = max((m.micro_config.micro_batch_size for m in measured), default=1)
        for m in measured:
            per_sample_s = m.setup_s / largest + m.step_s / m.micro_config.micro_batch_size
            best[m.micro_config.algorithm] = min(per_sample_s, best.get(m.micro_config.algorithm, inf))
        if len(best) > 1:
            fastest_s = min(best.values())
            self._known[_class(problem)][_place(problem)] = {name: s / fastest_s for name, s in best.items()}

    def expected(self, problem: ConvProblem, algorithm: str) -> Expectation | None:
        """Return what to expect of an algorithm, from similar problems, else from other operations; None if unknown.

        Other operations can only show that an algorithm is hopeless; they differ too much for more.
        """
        if (own := self._near(problem, algorithm)) is not None:
            return own
        others = (problem.with_operation(op) for op in Operation if op is not problem.operation)
        said = [expectation.ratio for other in others if (expectation := self._near(other, algorithm))]
        is_bad = bool(said) and min(said) > HOPELESS_ELSEWHERE
        return Expectation(min(said), HOPELESS_ELSEWHERE) if is_bad else None

    def _near(self, problem: ConvProblem, algorithm: str) -> Expectation | None:
        here = _place(problem)
        alike = self._known.get(_class(problem), {})
        known = sorted(
            (_distance(here, place), ratios[algorithm]) for place, ratios in alike.items() if algorithm in ratios
        )
        near = [ratio for distance, ratio in known[:NEIGHBOURS] if distance <= REACH]
        return Expectation(min(near), HOPELESS_IN_LIKE[len(near)]) if len(near) in HOPELESS_IN_LIKE else None


def _class(problem: ConvProblem) -> _Class:
    grouped = "dense" if problem.groups == 1 else "depthwise" if problem.groups == problem.c else "grouped"
    filter_and_steps = (problem.r, problem.s, problem.stride, problem.dilation)
    return problem.operation, *filter_and_steps, grouped, problem.dtype, problem.memory_format


def _place(problem: ConvProblem) -> _Place:
    return log2(problem.c), log2(problem.k), log2(problem.p * problem.q)


def _distance(one: _Place, other: _Place) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))
