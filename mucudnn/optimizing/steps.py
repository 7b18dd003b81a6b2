"""Timed steps of a model, such as training steps, with torch's convolutions and with ours, single or interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from mucudnn.core.config import Config
from mucudnn.core.records import is_busy
from mucudnn.distributed.team import Team
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.optimizing.confirmation import InTurns
from mucudnn.optimizing.in_place import InPlaceTimes, Place, Spent
from mucudnn.running.dispatcher import untouched
from mucudnn.running.modules import TunedModule, running_torchs_own
from mucudnn.tuning.choose import baseline_of
from mucudnn.tuning.quiet import Quiet
from mucudnn.tuning.result import TunedProblem, tuned_of

RECORD_S = 6e-5  # upper bound on the time to record a call, reached by torch's own
NEGLIGIBLE = 0.01  # share of recording in a step up to which recorded steps represent the user's

# Bounds of a phase, a series of rounds. Disturbed rounds are counted separately, with the same bounds.
LEAST_ROUNDS = 2
CLEAR_ROUNDS = 5  # from here on, a phase ends once the step is clearly faster or slower
MOST_ROUNDS = 25
PHASE_S = 5.0  # time after which no round begins, once there are LEAST_ROUNDS

Step = Callable[[nn.Module], object]  # runs one step of the given model
PutIn = Callable[[TunedModule, Sequence[TunedProblem]], None]  # applies choices to a module
TunedModules = Mapping[str, tuple[TunedProblem, ...]]  # module name -> its tuned problems


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a step of the model and, if recorded, of each convolution in it.

    load: share of the machine that other processes took, as in ``Measurement``.
    """

    time_s: float
    convolutions: Mapping[Place, Spent] = field(default_factory=dict)
    load: float | None = None

    @property
    def convolutions_s(self) -> float:
        return sum(spent.time_s for spent in self.convolutions.values())


@dataclass
class ModelSteps:
    """Runner of a model's steps, with access to the choices of its tuned modules. modules: tuned modules by name.

    ranks: the processes that run the steps together, in which rank 0 decides.
    """

    model: nn.Module
    modules: Mapping[str, TunedModule]
    step: Step
    config: Config
    into_module: PutIn
    device_type: str
    quiet: Quiet
    ranks: Team

    @cached_property
    def _clock(self) -> Clock:
        return wall_clock(self.device_type)

    @cached_property
    def _times(self) -> InPlaceTimes:
        return InPlaceTimes(self.device_type)

    @property
    def tuned(self) -> TunedModules:
        """The tuned choices of each module, by the module's name."""
        return {name: tuned_of(module) for name, module in self.modules.items()}

    def wait(self) -> None:
        """Wait until the cores are free, up to the limits of ``Quiet``."""
        self.quiet.wait()

    def run(self, *, ours: bool, recorded: bool) -> StepTimes:
        """Run a step of the model and return its times.

        ours: whether to run tuned choices, rather than torch's convolutions. recorded: whether to time each
        convolution.
        """
        watch = self.quiet.watch
        mark = watch.mark()
        with ExitStack() as stack:
            if not ours:
                stack.enter_context(running_torchs_own(self.modules.values()))
            stack.enter_context(self._times.recording() if recorded else untouched)
            begun_s = self._clock.now()
            self.step(self.model)
            time_s = self._clock.now() - begun_s
        return StepTimes(time_s, self._times.take() if recorded else {}, watch.since(mark).share)

    def may_run_torchs_own(self, tuned: TunedProblem) -> bool:
        """Return whether the workspace of torch's convolution for this problem is within the limit."""
        if self.config.has_headroom_limit or self.config.baseline_exempt or tuned.limit_bytes is None:
            return True
        baseline = baseline_of(tuned.measurements, tuned.batch_size)
        return baseline is not None and baseline.workspace_bytes <= tuned.limit_bytes

    def put_in(self, tuned: TunedModules) -> None:
        """Make the modules run the choices ``tuned``."""
        for name, module in self.modules.items():
            self.into_module(module, tuned[name])


@dataclass(frozen=True, slots=True)
class Rounds:
    """Times of interleaved steps of a model: in each round one step with torch's convolutions and one with ours."""

    torchs: list[StepTimes] = field(default_factory=list)
    ours: list[StepTimes] = field(default_factory=list)

    @classmethod
    def run(cls, steps: ModelSteps, *, recorded: bool) -> Rounds:
        """Run interleaved steps until their result is clear to rank 0 or time is up.

        Returns the undisturbed rounds, or the disturbed ones if there are too few.
        """
        quiet, disturbed = cls(), cls()
        while steps.ranks.of_rank_0(not (quiet._is_over or quiet._is_clear or disturbed._is_over)):
            is_odd = (len(quiet.ours) + len(disturbed.ours)) % 2  # alternate which side comes first
            turns = (True, False) if is_odd else (False, True)
            both = {ours: steps.run(ours=ours, recorded=recorded) for ours in turns}
            is_disturbed = any(is_busy(times.load) for times in both.values())
            rounds = disturbed if is_disturbed else quiet
            rounds.torchs.append(both[False])
            rounds.ours.append(both[True])
            if is_disturbed:
                steps.wait()
        return quiet if len(quiet.ours) >= LEAST_ROUNDS else disturbed

    @property
    def _is_over(self) -> bool:
        done, spent_s = len(self.ours), sum(times.time_s for times in self.every)
        return done >= MOST_ROUNDS or (done >= LEAST_ROUNDS and spent_s >= PHASE_S)

    @property
    def _is_clear(self) -> bool:
        return len(self.ours) >= CLEAR_ROUNDS and (self.steps.is_faster or self.steps.is_slower)

    @property
    def every(self) -> list[StepTimes]:
        return [*self.torchs, *self.ours]

    @property
    def load(self) -> float | None:
        """Largest share of the machine that other processes took during a step, or None if unknown."""
        return max((times.load for times in self.every if times.load is not None), default=None)

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine was too busy for a conclusion."""
        return is_busy(self.load)

    @property
    def steps(self) -> InTurns:
        return InTurns.of([times.time_s for times in self.torchs], [times.time_s for times in self.ours])

    @property
    def convolutions(self) -> InTurns:
        return InTurns.of([times.convolutions_s for times in self.torchs], [t.convolutions_s for t in self.ours])

    @property
    def is_slowed(self) -> bool:
        """Whether recording the time of each convolution takes more than a negligible share of the steps."""
        return any(
            RECORD_S * sum(spent.calls for spent in times.convolutions.values()) > NEGLIGIBLE * times.time_s
            for times in self.every
        )


@contextmanager
def restored_on_failure(modules: Iterable[TunedModule]) -> Iterator[None]:
    """Restore the modules' current choices if the block raises an error."""
    before = [(module, module.tuned, module.choices) for module in modules]
    try:
        yield
    except BaseException:
        for module, tuned, choices in before:
            module.tuned, module.choices = tuned, choices
        raise
