"""Results of confirming a tuned model: its steps and convolutions timed with torch's own and with ours, interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Self

from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import is_busy
from mucudnn.words.samples import uncertainty
from mucudnn.words.units import format_seconds

LEAST_LOSS = 0.01  # the rounds are few: their noise may seem smaller than it is


@dataclass(frozen=True, slots=True)
class InTurns:
    """Times of torch's own convolution and ours, measured in alternation: medians over the rounds, in seconds.

    speedup: the median of torch / ours in each round. uncertainty: noise of the speedup, computed as in ``WholeRun``.
    """

    torch_s: float
    time_s: float
    speedup: float
    uncertainty: float
    rounds: int

    @classmethod
    def of(cls, torchs_s: Sequence[float], ours_s: Sequence[float]) -> Self:
        """Compare the seconds of each round, torch's and ours; the speedup is 1 if ours take no time."""
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


@dataclass(frozen=True, slots=True)
class InPlace:
    """Seconds of a convolution call within the model's own step, equal layers together: torch's own, and ours as tuned.

    operations: those that the call computes; torch computes dx and dw in one call, so these are compared together.
    loses: if ours is slower, whether torch's own is to compute this operation again.
    """

    operations: tuple[Operation, ...]
    call: InTurns
    loses: bool = False

    def __str__(self) -> str:
        together = ", with ".join(str(operation).replace("_", " ") for operation in self.operations)
        joint = f" ({together})" if len(self.operations) > 1 else ""
        seconds = f"PyTorch {format_seconds(self.call.torch_s)}, ours {format_seconds(self.call.time_s)}"
        return f"{seconds}, {self.call.in_words}{joint}"


@dataclass(frozen=True, slots=True)
class PutBack:
    """A problem of a module that torch's own convolution computes again after a confirmation, and the reason.

    is_allowed: if false, our convolution still runs, since torch's own needs more workspace than the limit.
    """

    module: str
    problem: ConvProblem
    batch_size: int
    why: str
    is_allowed: bool = True

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'}: {self.problem}, batch {self.batch_size}: {self.why}"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Comparison of a model's own step with torch's convolutions and with ours, interleaved. Prints as one line.

    step: the whole step. recorded: the steps in which convolutions were timed one by one, with a small overhead.
    convolutions: the summed time of all in such a step. over_tuned: time of a call within the step over its time in
    tuning, the median over the tuned convolutions; None if unknown. put_back: problems that torch's own runs again,
    since ours was slower in place. is_withdrawn: whether torch's own runs everywhere, since the step was still slower.
    kept: problems for which ours is slower in place but stays, since torch's own needs more workspace than the limit.
    load: as of a ``Measurement``. stored_on: the day of the steps if they are from the database; None if they ran just
    now.
    """

    step: InTurns
    recorded: InTurns
    convolutions: InTurns
    over_tuned: float | None = None
    put_back: tuple[PutBack, ...] = ()
    is_withdrawn: bool = False
    kept: tuple[PutBack, ...] = ()
    load: float | None = None
    stored_on: str | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes kept the machine so busy that the comparison of steps decided nothing."""
        return is_busy(self.load)

    @property
    def heading(self) -> str:
        return "confirmed" if self.stored_on is None else f"confirmed on {self.stored_on}"

    @property
    def share(self) -> float:
        """Share of the convolutions in the time of torch's step, from 0 to 1, in the steps in which they were timed."""
        return min(1.0, self.convolutions.torch_s / self.recorded.torch_s)

    @property
    def most_speedup(self) -> float:
        """Speedup of the step if convolutions took no time (Amdahl's law)."""
        return inf if self.share == 1 else 1 / (1 - self.share)

    @property
    def rest(self) -> float:
        """Time of a step without its convolutions: seconds with ours over seconds with torch's, in the recorded steps.

        The time includes the overhead of recording, which is largest for torch's convolutions.
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
        """The summary line of the confirmation, and its further findings, a line each."""
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
