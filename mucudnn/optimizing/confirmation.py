"""Results of confirming a tuned model: interleaved timings of its steps and convolutions, with torch's own and ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Self

from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import is_busy
from mucudnn.core.statistics import uncertainty
from mucudnn.core.values import format_seconds

LEAST_LOSS = 0.01  # with few rounds the noise may be underestimated


@dataclass(frozen=True, slots=True)
class InTurns:
    """Interleaved times of torch's own convolutions and ours: medians over the rounds, in seconds.

    speedup: median over the rounds of torch / ours. uncertainty: noise of the speedup, computed as in ``Comparison``.
    """

    torch_s: float
    time_s: float
    speedup: float
    uncertainty: float
    rounds: int

    @classmethod
    def of(cls, torchs_s: Sequence[float], ours_s: Sequence[float]) -> Self:
        """Compare the seconds of each round, torch's and ours; where ours is 0, the ratio is 1."""
        ratios = [torch_s / time_s if time_s else 1.0 for torch_s, time_s in zip(torchs_s, ours_s, strict=True)]
        return cls(median(torchs_s), median(ours_s), median(ratios), uncertainty(ratios), len(ratios))

    @property
    def is_faster(self) -> bool:
        """Whether our convolution is faster than torch's own by more than the noise."""
        return self.speedup - max(self.uncertainty, LEAST_LOSS) > 1

    @property
    def is_slower(self) -> bool:
        """Whether our convolution is slower than torch's own by more than the noise."""
        return self.speedup + max(self.uncertainty, LEAST_LOSS) < 1

    @property
    def in_words(self) -> str:
        return f"{self.speedup:.2f} ± {self.uncertainty:.2f}"

    def __str__(self) -> str:
        return f"PyTorch {format_seconds(self.torch_s)}, ours {format_seconds(self.time_s)}, {self.in_words}"


@dataclass(frozen=True, slots=True)
class PutBack:
    """A problem of a module for which ours is slower in the step, with the reason."""

    module: str
    problem: ConvProblem
    batch_size: int
    why: str

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'}: {self.problem}, batch {self.batch_size}: {self.why}"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Interleaved comparison of a model's own step with torch's convolutions and with ours. Prints as one line.

    step: the whole step. recorded: steps in which each convolution is timed, with a small overhead. convolutions:
    summed time of all convolutions in such a step. over_tuned: median over the tuned convolutions of the time in the
    step / the time in tuning; None if unknown. put_back: problems for which torch's own was restored, since ours was
    slower in place. is_withdrawn: whether torch's own was restored everywhere, since the step was still slower. kept:
    problems for which ours is slower in place but stays, since torch's own needs more workspace than the limit. load:
    as in ``Measurement``.
    """

    step: InTurns
    recorded: InTurns
    convolutions: InTurns
    over_tuned: float | None = None
    put_back: tuple[PutBack, ...] = ()
    is_withdrawn: bool = False
    kept: tuple[PutBack, ...] = ()
    load: float | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine was too busy for a conclusive comparison of steps."""
        return is_busy(self.load)

    @property
    def share(self) -> float:
        """Share of the convolutions in the time of torch's recorded steps, from 0 to 1."""
        return min(1.0, self.convolutions.torch_s / self.recorded.torch_s)

    @property
    def most_speedup(self) -> float:
        """Speedup of the step if convolutions took no time (Amdahl's law)."""
        return inf if self.share == 1 else 1 / (1 - self.share)

    @property
    def rest(self) -> float:
        """Ratio, ours / torch's, of the time that a recorded step spends outside its convolutions.

        It includes the overhead of recording, which is largest for torch's convolutions.
        """
        torch_s = self.recorded.torch_s - self.convolutions.torch_s
        return (self.recorded.time_s - self.convolutions.time_s) / torch_s if torch_s > 0 else inf

    def __str__(self) -> str:
        step = self.step
        verdict = "" if step.is_faster else ", slower" if step.is_slower else ", no clear difference"
        bound = "" if self.most_speedup == inf else f", so at most {self.most_speedup:.2f}x"
        parts = (
            f"step {_ms(step.torch_s)} -> {_ms(step.time_s)} ms, {step.speedup:.2f}x ± {step.uncertainty:.2f}{verdict}",
            f"convolutions {self.convolutions.speedup:.2f}x",
            f"{100 * self.share:.0f} % of the step were convolutions{bound}",
            *(["PyTorch's own runs everywhere"] if self.is_withdrawn else []),
            *([f"measured on a busy machine, {self.load:.0%} of its speed was missing"] if self.is_disturbed else []),
        )
        return "; ".join(parts)

    def details(self) -> str:
        """Return the summary line of the confirmation and its details, one per line."""
        lines = [str(self), f"all that is not a convolution takes {self.rest:.2f} times as long as with PyTorch's own"]
        if self.over_tuned is not None:
            lines.append(
                f"a tuned convolution takes {self.over_tuned:.2f} times as long as tuning measured, in the median"
            )
        lines += [f"PyTorch's own again in {one}" for one in self.put_back]
        lines += [f"PyTorch's own needs more than the workspace limit in {one}" for one in self.kept]
        return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.0995 else f"{seconds * 1e3:.3g}"
