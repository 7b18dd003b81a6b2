"""Prunes candidates: tells which micro-configs cannot win, from the times that are known."""

from __future__ import annotations

from dataclasses import dataclass, field

from mucudnn.measuring.candidates import Candidate
from mucudnn.words.results import Measurement, MicroConfig

# Most that a larger micro-batch is faster, per sample, than the best smaller one of the same algorithm. The factor is
# smaller against times of an earlier run: what that run passed over must not be measured later for mere noise.
_OPTIMISM = 2.0
_OPTIMISM_WHEN_STORED = 1.2
_MARGIN = 1.1  # a lead below this may be noise, however steady the samples are
_FIRST_MARGIN = 1.5  # after a single sample


@dataclass(slots=True)
class KnownTimes:
    """Times known so far, and what they say about a candidate.

    A micro-config is hopeless if a rival is faster for the whole mini-batch, by more than the noise can explain. The
    rival needs no more workspace, and its micro-batch divides the other's: so no configuration gains by using the
    hopeless one. Since only divisors count, the smallest sizes stay; remainders and small workspace limits need them.

    ``may_keep``: what a candidate prepares may be cached from call to call, so that it is judged without its setup.
    """

    batch_size: int
    measurements: dict[MicroConfig, Measurement] = field(default_factory=dict)
    stored: frozenset[str] = frozenset()  # algorithms with times from an earlier run
    fastest_s: dict[MicroConfig, float] = field(default_factory=dict)
    may_keep: bool = False

    def add(self, measurement: Measurement, fastest_s: float) -> None:
        """Add the time of a candidate, and its fastest sample.

        It is judged by its fastest sample: a slow moment of the machine is not its fault. As a rival it counts with its
        median.
        """
        self.measurements[measurement.micro_config] = measurement
        self.fastest_s[measurement.micro_config] = fastest_s

    def is_beaten(self, measurement: Measurement) -> bool:
        """Whether a measured micro-config is hopeless. The fewer and the noisier the samples, the more it takes."""
        rivals = self._rivals(measurement.micro_config, _workspace_bytes(measurement))
        total_s = self._setup_s(measurement) + self._steps_s(measurement, self._fastest_s(measurement))
        return any(total_s > _margin(measurement, rival) * self._total_s(rival) for rival in rivals)

    def is_outclassed(self, candidate: Candidate) -> bool:
        """Whether an unmeasured micro-config is hopeless, even if it is far better than its smaller sizes.

        It needs no less workspace than these. So its own workspace is not asked for, unless it is known without
        running.
        """
        name, size = candidate.algorithm.name, candidate.micro_batch_size
        own = [m for c, m in self.measurements.items() if c.algorithm == name and c.micro_batch_size < size]
        if not own:
            return False
        optimism = _OPTIMISM_WHEN_STORED if name in self.stored else _OPTIMISM
        per_sample_s = min(self._fastest_s(m) / m.micro_config.micro_batch_size for m in own) / optimism
        total_s = self._setup_s(own[0]) + per_sample_s * self.batch_size
        workspace_bytes = candidate.handed_bytes if candidate.from_source else max(map(_workspace_bytes, own))
        rivals = self._rivals(candidate.micro_config, workspace_bytes)
        return any(total_s > self._total_s(rival) for rival in rivals)

    def error_of(self, algorithm: str) -> float | None:
        """Relative error of an algorithm that has been measured."""
        errors = [m.relative_error for m in self.measurements.values() if m.micro_config.algorithm == algorithm]
        return max(errors, default=None)

    def _rivals(self, micro_config: MicroConfig, workspace_bytes: int) -> list[Measurement]:
        return [
            m
            for m in self.measurements.values()
            if m.micro_config != micro_config
            and micro_config.micro_batch_size % m.micro_config.micro_batch_size == 0
            and _workspace_bytes(m) <= workspace_bytes
        ]

    def _fastest_s(self, measurement: Measurement) -> float:
        return self.fastest_s.get(measurement.micro_config, measurement.step_s)

    def _setup_s(self, candidate: Measurement) -> float:
        return 0.0 if self.may_keep else candidate.setup_s

    def _total_s(self, rival: Measurement) -> float:
        return rival.setup_s + self._steps_s(rival, rival.step_s)

    def _steps_s(self, measurement: Measurement, step_s: float) -> float:
        """Seconds for the whole mini-batch; fractions of a micro-batch count as such."""
        return self.batch_size / measurement.micro_config.micro_batch_size * step_s


def _workspace_bytes(measurement: Measurement) -> int:
    return measurement.prepared_bytes + measurement.scratch_bytes


def _margin(one: Measurement, other: Measurement) -> float:
    if min(one.samples, other.samples) < 2:
        return _FIRST_MARGIN
    return max(_MARGIN, 1 + 2 * (one.noise + other.noise))
