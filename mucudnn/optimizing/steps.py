"""Steps of a model, timed in turns with torch's convolutions and with ours, and each convolution in them, in place.

In place means: with the step's own operands, caches and heap. Torch's own calls are recorded in torch's dispatcher
(``dispatcher``), ours by the ``observer`` of the operators. On a GPU, events of the current stream replace the clock.
Not run on a GPU yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Comparison, is_busy
from mucudnn.core.team import Team
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.measuring.clocks import Clock
from mucudnn.measuring.heap import Usage
from mucudnn.measuring.quiet import Quiet
from mucudnn.measuring.turns import Rounds, in_turns
from mucudnn.running import operators
from mucudnn.running.dispatcher import Kernel, Wrapper, torchs_kernel, untouched, wrapped
from mucudnn.running.modules import TunedModule, running_torchs_own, running_without_norms
from mucudnn.running.norms import TunedNorm
from mucudnn.running.problems import problem_of_call
from mucudnn.tuning.choose import baseline_of
from mucudnn.tuning.model_state import set_gradients

ROUNDS = Rounds(2, 25, 5.0, sure=5)  # of steps in turns, and of disturbed ones, which are counted apart
LEAST_CHANGE = 0.01  # smaller changes of a step do not count: with few rounds the noise may be underestimated

Step = Callable[[nn.Module], object]  # runs one step of the given model
PutIn = Callable[[TunedModule, Sequence[TunedProblem]], None]  # applies choices to a module
TunedModules = Mapping[str, tuple[TunedProblem, ...]]  # module name -> its tuned problems

Layer = tuple[ConvProblem | None, int, bool]  # forward problem, batch size, whether in the backward pass
_Result = TypeVar("_Result")
_FORWARD, _DATA, _FILTER = ((operation,) for operation in Operation)


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call of a convolution in a step of the model: its problem, the operations that it computes, and the pass.

    problem: the forward problem; None if no problem describes the call.
    operations: torch computes dx and dw in one call, and the forward pass of a transposed convolution is backward data.
    """

    problem: ConvProblem | None
    batch_size: int
    operations: tuple[Operation, ...]
    in_backward: bool

    @property
    def layer(self) -> Layer:
        """What calls have in common that are compared together."""
        return self.problem, self.batch_size, self.in_backward


@dataclass(frozen=True, slots=True)
class Spent:
    """Number of equal calls in a step, and their total seconds."""

    calls: int
    time_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a step of the model and, if recorded, of each convolution in it.

    load: as in ``Measurement``.
    faults: page faults.
    kernel_share: of the processor time, from 0 to 1.
    peak_bytes: most resident bytes of the process, 0 if not observed.
    """

    time_s: float
    convolutions: Mapping[StepCall, Spent] = field(default_factory=dict)
    load: float | None = None
    faults: int = 0
    kernel_share: float = 0.0
    peak_bytes: int = 0


TimedRounds = list[tuple[StepTimes, StepTimes]]  # of each round, such as torch's step and ours


@dataclass
class ModelSteps:
    """A model whose steps run in turns, with the choices ``tuned`` of its ``modules``, both by module name.

    norms: modules whose norms run as groups.
    into_module: applies choices to a module.
    times: recorder of the convolutions in a step.
    ranks: the processes that run the steps together, in which rank 0 decides.
    """

    model: nn.Module
    modules: Mapping[str, TunedModule]
    norms: Mapping[str, TunedNorm]
    tuned: TunedModules
    step: Step
    config: Config
    into_module: PutIn
    clock: Clock
    times: InPlaceTimes
    quiet: Quiet
    ranks: Team

    def run(self, *, ours: bool, recorded: bool, groups: bool = True) -> StepTimes:
        """Run a step of the model and return its times.

        ours: whether to run tuned choices, rather than torch's operators.
        recorded: whether to time each convolution.
        groups: whether norms of tuned choices run as groups.
        """
        mark, usage = self.quiet.watch.mark(), Usage.now()
        with ExitStack() as stack:
            if not ours:
                stack.enter_context(running_torchs_own(self.modules.values()))
            if not (ours and groups):
                stack.enter_context(running_torchs_own(self.norms.values()))
            if ours and not groups:
                stack.enter_context(running_without_norms(self.modules.values()))
            stack.enter_context(self.times.recording() if recorded else untouched)
            begun_s = self.clock.now()
            self.step(self.model)
            time_s = self.clock.now() - begun_s
        used, load = Usage.now().since(usage), self.quiet.watch.since(mark).share
        return StepTimes(time_s, self.times.take() if recorded else {}, load, used.faults, used.kernel_share)

    def torchs_and_ours(self, *, recorded: bool) -> tuple[Callable[[], StepTimes], Callable[[], StepTimes]]:
        """Return two functions: one runs a step with torch's operators, the other one with tuned choices."""
        return partial(self.run, ours=False, recorded=recorded), partial(self.run, ours=True, recorded=recorded)

    def peak_bytes(self, *, ours: bool) -> int:
        """Run a step of the model; return the most bytes that torch has allocated in it, with the gradients."""
        set_gradients((parameter, None) for parameter in self.model.parameters())
        return peak_allocated_bytes(lambda: self.run(ours=ours, recorded=False), self.times.device_type)

    def may_run_torchs_own(self, tuned: TunedProblem) -> bool:
        """Return whether the workspace of torch's convolution for this problem is within the limit."""
        if self.config.has_headroom_limit or self.config.baseline_exempt or tuned.limit_bytes is None:
            return True
        baseline = baseline_of(tuned.measurements, tuned.batch_size)
        return baseline is not None and baseline.workspace_bytes <= tuned.limit_bytes

    def put_in(self, tuned: TunedModules) -> None:
        """Make the modules run the choices ``tuned``."""
        self.tuned = tuned
        for name, module in self.modules.items():
            self.into_module(module, tuned[name])


def steps_in_turns(
    steps: ModelSteps, kinds: tuple[Callable[[], StepTimes], Callable[[], StepTimes]], rounds: Rounds = ROUNDS
) -> TimedRounds:
    """Run two kinds of steps in turns, until the result is clear to rank 0 or time is up.

    Rounds that other processes disturbed are repeated; they are returned only if there are too few others.
    """
    quiet: TimedRounds = []
    disturbed: TimedRounds = []
    for first, second in in_turns(kinds):
        is_disturbed = is_busy(first.load) or is_busy(second.load)
        (disturbed if is_disturbed else quiet).append((first, second))
        step = compared(quiet, step_s) if quiet else None
        is_clear = step is not None and (step.is_faster(LEAST_CHANGE) or step.is_slower(LEAST_CHANGE))
        quiet_s, disturbed_s = (sum(step_s(times) for pair in pairs for times in pair) for pairs in (quiet, disturbed))
        is_enough = rounds.is_enough(len(quiet), quiet_s, is_clear=is_clear)
        gives_up = rounds.is_enough(len(disturbed), disturbed_s, is_clear=False)
        if steps.ranks.of_rank_0(is_enough or gives_up):
            break
        if is_disturbed:
            steps.quiet.wait()
    return quiet if len(quiet) >= rounds.least else disturbed


def step_s(times: StepTimes) -> float:
    """Return the seconds of the whole step, which ``compared`` may compare."""
    return times.time_s


def compared(rounds: TimedRounds, seconds: Callable[[StepTimes], float]) -> Comparison:
    """Compare the second kind of step with the first.

    seconds: returns those of what is compared in a step; steps without it count as equal.
    """
    first_s, second_s = ([seconds(times) or 1e-9 for times in side] for side in zip(*rounds, strict=True))
    comparison = Comparison.of(first_s, second_s)
    return replace(comparison, paired_speedup=median(comparison.speedups))


def load_of(*rounds: TimedRounds) -> float | None:
    """Return the largest share of the machine that other processes took during one of the steps; None if unknown."""
    loads = (times.load for series in rounds for pair in series for times in pair)
    return max((load for load in loads if load is not None), default=None)


class InPlaceTimes:
    """Recorder of the convolutions on one type of device, active within ``recording``.

    ``take`` returns the times of the recorded calls. Raises ``UnavailableError`` if this torch does not give access to
    its kernels.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._on_cpu = device_type == "cpu"
        self._now: Callable[[], Any] = time.perf_counter if self._on_cpu else _event
        self._described: dict[tuple[Any, ...], StepCall] = {}
        self._calls: list[tuple[StepCall, int, Any, Any]] = []
        self._thread = _OfThisThread()
        self._wrapper = _torchs(self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all convolution calls of all threads inside the block; only one recorder is active at a time.

        Convolutions that mucudnn does not compute run torch's own kernel, bypassing other wrappers in torch's
        dispatcher.
        """
        with _one_at_a_time, wrapped(self._wrapper):
            operators.observer = self
            try:
                yield
            finally:
                operators.observer = None

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in a convolution call that is being recorded."""
        return self._thread.inside

    def take(self) -> dict[StepCall, Spent]:
        """Wait for the recorded calls to finish; return number and time of the calls since the last ``take``."""
        calls, self._calls = self._calls, []
        if not self._on_cpu:
            torch.cuda.synchronize()
        spent: dict[StepCall, Spent] = {}
        for call, count, begun, ended in calls:
            time_s = ended - begun if self._on_cpu else begun.elapsed_time(ended) / 1000
            before = spent.get(call, Spent(0, 0.0))
            spent[call] = Spent(before.calls + count, before.time_s + time_s)
        return spent

    def record(
        self,
        compute: Callable[..., _Result],
        arguments: Sequence[Any],
        operations: tuple[Operation, ...],
        x: Tensor | None,
        w: Tensor,
        *geometry: Any,
    ) -> _Result:
        """Return the result of ``compute``, and record its time unless this thread is already in a recorded call.

        On None nothing is recorded, since the caller runs and records a fallback next.

        x, w, geometry: describe the problem; x is None if the call computes x.
        """
        if self._thread.inside:
            return compute(*arguments)
        result, *times = self._timed(compute, arguments)
        if result is not None:
            self._thread.last = self._call(operations, result if x is None else x, w, geometry)
            self._calls.append((self._thread.last, 1, *times))
        return result

    def record_more(self, compute: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return the result of ``compute``, and add its time to the last recorded call.

        Use it for the gradient of the bias, which torch computes with dw.
        """
        result, *times = self._timed(compute, arguments)
        if self._thread.last is not None:
            self._calls.append((self._thread.last, 0, *times))
        return result

    def _timed(self, compute: Callable[..., _Result], arguments: Sequence[Any]) -> tuple[_Result, Any, Any]:
        """Return the result of ``compute``, and the clock's readings before and after the call."""
        was_inside, self._thread.inside = self._thread.inside, True
        try:
            begun = self._now()
            result = compute(*arguments)
            return result, begun, self._now()
        finally:
            self._thread.inside = was_inside

    def _call(self, operations: tuple[Operation, ...], x: Any, w: Tensor, geometry: Sequence[Any]) -> StepCall:
        """Look up the description of a call, which takes 1 to 2 microseconds, most of the overhead of recording."""
        in_backward = torch._C._current_graph_task_id() >= 0
        stride, padding, dilation, groups = geometry
        layout = (x.shape, x.stride(), x.dtype, w.shape, w.stride())
        key = (operations, in_backward, layout, tuple(stride), tuple(padding), tuple(dilation), groups)
        call = self._described.get(key)
        if call is None:
            problem = problem_of_call(x, w, stride, padding, dilation, groups)
            call = self._described[key] = StepCall(problem, len(x) if x.dim() else 0, operations, in_backward)
        return call


class _OfThisThread(threading.local):
    inside = False  # whether in a recorded call
    last: StepCall | None = None


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


_one_at_a_time = threading.Lock()


def _torchs(times: InPlaceTimes) -> Wrapper:
    device_type = times.device_type
    forward_kernel, backward_kernel = (
        torchs_kernel(name, device_type) for name in ("convolution", "convolution_backward")
    )

    def forward(following: Kernel, *arguments: Any) -> Any:
        x, w, _, stride, padding, dilation, transposed, _, groups = arguments
        if x.device.type != device_type:
            return following(*arguments)
        operations = _DATA if transposed else _FORWARD
        operand = None if transposed else x
        return times.record(forward_kernel, arguments, operations, operand, w, stride, padding, dilation, groups)

    def backward(following: Kernel, *arguments: Any) -> Any:
        dy, x, w, _, stride, padding, dilation, transposed, _, groups, (needs_dx, needs_dw, _) = arguments
        if x.device.type != device_type:
            return following(*arguments)
        operations = (_FORWARD if transposed else _DATA) * needs_dx + _FILTER * needs_dw
        operand = dy if transposed else x
        return times.record(backward_kernel, arguments, operations, operand, w, stride, padding, dilation, groups)

    return Wrapper(forward, backward)
