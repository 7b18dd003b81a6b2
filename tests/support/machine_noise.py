"""Made-up samples of two shared cores, after what real ones looked like.

Fourteen convolutions of AlexNet (4 to 9 ms each), torch against itself, three runs of 15 rounds on two shared cores:
the ratio of two calls of one round has an IQR / 1.35 of 5.6 % in the median row and of 12 % in one of ten, and a
standard deviation of 13 %, since some calls take a third longer by themselves. Whole seconds to minutes are a third
slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

SPREAD = 0.04  # of the logarithm of a call's time
DISTURBED, DISTURBANCE = 0.08, 0.33  # share of calls, and how much longer they take
SLOW = 4 / 3
_SHORTEST_S, _LONGEST_S = 2.0, 180.0  # of a phase, slow or not


@dataclass(slots=True)
class NoisyMachine:
    """Two shared cores from a moment on. Phases are those of the machine: all calls of a time share them."""

    seed: int
    now_s: float = 0.0
    _is_slow: bool = False
    _until_s: float = 0.0
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self._is_slow = bool(self.random.integers(2))

    def call(self, quiet_s: float) -> float:
        """Return how long a call takes, now."""
        while self.now_s >= self._until_s:
            self._is_slow = not self._is_slow
            self._until_s += float(np.exp(self.random.uniform(np.log(_SHORTEST_S), np.log(_LONGEST_S))))
        took_s = quiet_s * float(np.exp(self.random.normal(0.0, SPREAD)))
        took_s *= SLOW if self._is_slow else 1.0
        took_s *= 1 + DISTURBANCE * (self.random.random() < DISTURBED)
        self.now_s += took_s
        return took_s

    def in_turns(self, quiet_s: Mapping[str, float], rounds: int) -> dict[str, list[float]]:
        """Return samples of contestants in turns, each 10 ms or a call, in a random order each round."""
        samples: dict[str, list[float]] = {name: [] for name in quiet_s}
        for _ in range(rounds):
            for name in self.random.permutation([*quiet_s]):
                samples[name].append(self.call(quiet_s[name]))
        return samples
