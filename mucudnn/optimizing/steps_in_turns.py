"""Steps of a model in turns, torch's own convolutions and ours, until enough of them ran on a quiet machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mucudnn.optimizing.in_place import Place, Spent
from mucudnn.tuning.confirmation import InTurns, PutBack
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.results import is_busy

RECORD_S = 6e-5  # seconds that meeting and noting a call takes, at most: torch's take the longest
NEGLIGIBLE = 0.01  # part of a step that recording may take where its steps count as the user's

TunedModules = Mapping[str, tuple[TunedProblem, ...]]  # module name -> what was tuned for it


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, and of its convolutions one by one if they were recorded. load: as of a ``Measurement``."""

    time_s: float
    convolutions: Mapping[Place, Spent] = field(default_factory=dict)
    load: float | None = None

    @property
    def convolutions_s(self) -> float:
        return sum(spent.time_s for spent in self.convolutions.values())


class Steps(Protocol):
    """The model's own step, and the choices in the model."""

    def wait(self) -> None:
        """Wait until others leave the cores, as long as there is patience."""

    def run(self, *, ours: bool, recorded: bool) -> StepTimes:
        """Run a step: with what was chosen, or torch's own. recorded: each convolution is timed, too.

        Ranks that run steps together all get the same times, and decide alike.
        """

    def anywhere(self, holds: bool) -> bool:
        """Tell whether something holds here, or on any other rank that runs these steps: so that all go on alike."""

    def is_ours(self, module: str, tuned: TunedProblem) -> bool:
        """Tell whether anything else than torch's own runs."""

    def may_run_torchs_own(self, tuned: TunedProblem) -> bool:
        """Tell whether the workspace that torch's own needs is allowed."""

    def put_in(self, tuned: TunedModules, put_back: Sequence[PutBack]) -> None:
        """Have the modules run ``tuned`` from now on. put_back: what is torch's own again."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds of confirming. A phase is a series of rounds; there are up to three.

    shortest_s, longest_s: seconds of a step of torch that is confirmed without being asked for. phase_s: seconds after
    which no round of a phase begins, once there were ``least_rounds``. clear_rounds: number of rounds after which it
    ends if the step is clearly faster or slower. most_rounds: number after which it ends anyway. The same bounds hold
    once more for the rounds of a phase that others disturbed, which do not count.
    """

    shortest_s: float = 0.002
    longest_s: float = 2.5
    phase_s: float = 5.0
    least_rounds: int = 2
    clear_rounds: int = 5
    most_rounds: int = 25


EFFORT = Effort()


@dataclass(frozen=True, slots=True)
class Rounds:
    """Steps in turns: those of torch's own, and those of ours."""

    torchs: list[StepTimes] = field(default_factory=list)
    ours: list[StepTimes] = field(default_factory=list)

    @classmethod
    def run(cls, steps: Steps, effort: Effort, *, recorded: bool) -> Rounds:
        """Run a phase. Returns its quiet rounds; those that others disturbed where it did not become quiet."""
        quiet, disturbed = cls(), cls()
        while steps.anywhere(not (quiet._is_over(effort) or quiet._is_clear(effort) or disturbed._is_over(effort))):
            is_odd = (len(quiet.ours) + len(disturbed.ours)) % 2  # so that neither side always follows the other
            turns = (True, False) if is_odd else (False, True)
            both = {ours: steps.run(ours=ours, recorded=recorded) for ours in turns}
            is_disturbed = any(is_busy(times.load) for times in both.values())
            rounds = disturbed if is_disturbed else quiet
            rounds.torchs.append(both[False])
            rounds.ours.append(both[True])
            if is_disturbed:
                steps.wait()
        return quiet if len(quiet.ours) >= effort.least_rounds else disturbed

    def _is_over(self, effort: Effort) -> bool:
        done, spent_s = len(self.ours), sum(times.time_s for times in self.every)
        return done >= effort.most_rounds or (done >= effort.least_rounds and spent_s >= effort.phase_s)

    def _is_clear(self, effort: Effort) -> bool:
        return len(self.ours) >= effort.clear_rounds and (self.steps.is_faster or self.steps.is_slower)

    @property
    def every(self) -> list[StepTimes]:
        return [*self.torchs, *self.ours]

    @property
    def load(self) -> float | None:
        """The largest of any step; ``None``: unknown."""
        return max((times.load for times in self.every if times.load is not None), default=None)

    @property
    def is_disturbed(self) -> bool:
        """Whether others worked meanwhile, so that nothing follows of what was seen."""
        return is_busy(self.load)

    @property
    def steps(self) -> InTurns:
        return InTurns.of([times.time_s for times in self.torchs], [times.time_s for times in self.ours])

    @property
    def convolutions(self) -> InTurns:
        return InTurns.of([times.convolutions_s for times in self.torchs], [t.convolutions_s for t in self.ours])

    @property
    def is_slowed(self) -> bool:
        """Whether noting the calls takes more of the steps than may be passed over."""
        return any(
            RECORD_S * sum(spent.calls for spent in times.convolutions.values()) > NEGLIGIBLE * times.time_s
            for times in self.every
        )
