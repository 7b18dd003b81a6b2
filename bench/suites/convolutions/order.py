"""Order and pace of problems: where the time does not suffice for all, some of each kind of layer come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import median

from mucudnn.bench.contests.bounds import kind_of_layer
from mucudnn.bench.sources.layers import Layer
from mucudnn.tuning.job import expected_s
from mucudnn.words.problem import ConvProblem, Operation

Wanted = tuple[Layer, ConvProblem]


class Balance:
    """Picks what comes next: of the kinds of layers and of the operations that were met least, what has least work.

    met: what is measured already.
    """

    def __init__(self, met: Iterable[Wanted]) -> None:
        self._kinds: Counter[str] = Counter()
        self._operations: Counter[Operation] = Counter()
        self._both: Counter[tuple[str, Operation]] = Counter()
        for one in met:
            self.meet(one)

    def meet(self, wanted: Wanted) -> None:
        """Count a problem as met."""
        _, problem = wanted
        kind = kind_of_layer(problem)
        self._kinds[kind] += 1
        self._operations[problem.operation] += 1
        self._both[kind, problem.operation] += 1

    def next_of(self, left: Iterable[Wanted]) -> Wanted:
        """Return the one that comes next; ``left`` has some."""
        return min(left, key=self._often_met)

    def _often_met(self, wanted: Wanted) -> tuple[int, int, int]:
        layer, problem = wanted
        kind = kind_of_layer(problem)
        alone = self._kinds[kind] + self._operations[problem.operation]
        return alone, self._both[kind, problem.operation], problem.flops(layer.batch_size)


class Pace:
    """Estimate of how long problems take, from those that are done: the first is always begun."""

    def __init__(self) -> None:
        self._ratios: list[float] = []

    def learn(self, wanted: Wanted, seconds: float) -> None:
        """Note how long a problem took."""
        layer, problem = wanted
        self._ratios.append(seconds / expected_s(problem, layer.batch_size))

    def expected_s(self, wanted: Wanted) -> float:
        """Return the seconds that a problem is expected to take; 0 before the first."""
        layer, problem = wanted
        return median(self._ratios) * expected_s(problem, layer.batch_size) if self._ratios else 0.0
