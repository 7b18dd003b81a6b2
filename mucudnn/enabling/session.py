"""Sessions, which compute torch's convolutions and choose for each problem what runs.

That is its tuned configuration, the nearest tuned size's, or torch's convolution. Stored results are used immediately,
also those of the nearest size.
A layer (a problem without batch size, height and width) is tuned once calls of its sizes that are not tuned have taken
``PATIENCE`` times as long as tuning is expected to: what is called a few times costs next to nothing, and a tuning that
takes longer than expected makes the next ones wait longer. The 1st, 2nd, 4th, ... call of a size is timed, for those
until the next one; then the size may also be tuned. Once k sizes of a layer are known, another one is tuned only at its
2**k-th call or later, so at most log2(n) sizes are measured in n calls: a smaller last batch or varying image sizes
cost little. Until a size is tuned, the choice of the nearest size runs, and less of the time of its calls counts.

While nothing is stored for filters of this size, calls are only timed, since describing a problem takes longer than a
small convolution: the first one of a size until its layer is due, others until ``_DESCRIBED`` of that time.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError, first_line, raise_interruption, say_once, warnings_deferred
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Task
from mucudnn.enabling.status import Decision, Origin, ShapeStats, State, Status
from mucudnn.enabling.workshop import FIRST_CALL_S, Workshop, are_near, nearest
from mucudnn.kernels.memory import torch_format
from mucudnn.measuring.heap import HeapTrial
from mucudnn.running import operators
from mucudnn.running.dispatcher import Kernel, untouched
from mucudnn.running.problems import problem_of_call, problem_operation
from mucudnn.running.workspace import make_room

PATIENCE = 1.0  # seconds of untuned calls for each second that tuning is expected to take
_NEAR = 0.1  # share of the time of calls that counts if a size nearby is tuned, whose choice is hardly worse
_DESCRIBED, _PREPARED = 0.125, 0.5  # shares of these seconds after which sizes are described, and tuning prepared
_MOST_KEPT = 4096  # shapes, so that memory stays bounded
_LOOK_CALLS = 4  # calls of a problem between two looks at what a kept heap saves
_WAITS = Decision(why="to be tuned once its calls have taken as long as tuning would")
_MOST_FAILURES = 3  # consecutive ones, so that a permanent fault, such as a locked file, does not delay every layer


@dataclass(slots=True, eq=False)
class DispatchedCall:
    """Shapes of a call of torch's convolution, and statistics of its problems: the result and both gradients.

    problem: the FORWARD problem of the convolution; a transposed call runs its backward data.
    is_1d: whether the tensors have no height; then they are images of height 1.
    stats: statistics by operation, once it was asked for; None for those that the config excludes.
    """

    problem: ConvProblem
    batch_size: int
    device: torch.device
    is_1d: bool
    is_transposed: bool
    stats: dict[Operation, ShapeStats | None] = field(default_factory=dict)


class Session:
    """Session of tuning under one config: the convolution calls seen so far, and the choices for their problems.

    calls: by shapes, strides and geometry; None for calls that are never tuned.
    only_timed: numbers of forward calls that were only timed, by the hash of the call: Python's garbage collector does
    not visit numbers. Two calls with the same hash count as one size.
    first_s: by the hash of the layer, the seconds of these calls until they count as untuned calls.
    sizes: statistics by problem, batch size, device and number of threads.
    passed_by: number of shapes that are never tuned, by reason.
    spent_s: time of look-ups and measurements.
    expected_s: seconds that the next tuning is expected to take.
    untuned_s: by layer, seconds of calls of its untuned sizes since one was tuned.
    failures: number of tuning errors since the last success.
    is_deciding: whether other threads must wait before they compute, so that they do not disturb a measurement.
    """

    def __init__(self, config: Config, workshop: Workshop | None = None, clock: Callable[[], float] = monotonic):
        self.config, self.clock = config, clock
        self.workshop = workshop or Workshop(config)
        self.limit_bytes = config.workspace_limit_bytes
        self.torchs_limit_bytes = None if config.baseline_exempt else self.limit_bytes
        self.calls: dict[tuple[object, ...], DispatchedCall | None] = {}
        self.only_timed: dict[int, int] = {}
        self.first_s: dict[int, float] = {}
        self._described: dict[int, tuple[object, ...]] = {}  # layers of problems by their hash
        self.sizes: dict[tuple[object, ...], ShapeStats] = {}
        self.passed_by: Counter[str] = Counter()
        self.spent_s = 0.0
        self.expected_s = min(config.time_limit_s or FIRST_CALL_S, FIRST_CALL_S)
        self.untuned_s: defaultdict[tuple[object, ...], float] = defaultdict(float)
        self.is_deciding = False
        self.failures = 0
        self.heap = HeapTrial() if config.keep_heap is None else None
        self._tells_steps: ShapeStats | None = None  # its calls tell when to look at the heap
        self._layers: defaultdict[tuple[object, ...], list[ShapeStats]] = defaultdict(list)
        self._settled: defaultdict[tuple[object, ...], list[ShapeStats]] = defaultdict(list)  # those of a layer
        self._lock = threading.RLock()

    def forward(self, following: Kernel, x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> Any:
        """Return the result of ``aten::convolution`` by the choice, or by torch's kernel ``following`` without one.

        x: (N, C, H, W) or (N, C, W).
        w: (K, C // groups, R, S) or (K, C // groups, S), if transposed (C, K // groups, R, S).
        geometry: the arguments from stride to groups.
        """
        call = self._call(x, w, geometry, is_forward=True)
        if call is None:
            return following(x, w, bias, *geometry)
        if isinstance(call, int):
            began = self.clock()
            y = following(x, w, bias, *geometry)
            self.first_s[call] = self.first_s.get(call, 0.0) + self.clock() - began
            return y
        stats = self._stats_of(call, Operation.FORWARD)
        timed = self._counted(stats)
        began = self._now(call.device) if timed else 0.0
        y = self._computed(stats, call, x, w, None, None if call.is_transposed else bias)
        if y is None:
            self._make_room(stats)
            y = following(x, w, bias, *geometry)
        elif call.is_transposed and bias is not None:
            y = y.add_(bias.view(-1, *[1] * (y.dim() - 2)))
        self._account(timed, began)
        return y

    def backward(
        self,
        following: Kernel,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        bias_sizes: Sequence[int] | None,
        *geometry_and_mask: Any,
    ) -> Any:
        """Return the result of ``aten::convolution_backward``, by torch's kernel for gradients that are not tuned.

        geometry_and_mask: the arguments from stride to groups, then the output mask.
        """
        *geometry, (needs_dx, needs_dw, needs_db) = geometry_and_mask
        call = self._call(x, w, geometry)
        if not isinstance(call, DispatchedCall):
            return following(dy, x, w, bias_sizes, *geometry_and_mask)
        dx_stats = self._stats_of(call, Operation.BACKWARD_DATA) if needs_dx else None
        dw_stats = self._stats_of(call, Operation.BACKWARD_FILTER) if needs_dw else None
        timed = self._counted(dx_stats, dw_stats)
        began = self._now(call.device) if timed else 0.0
        dx, dw, db = self._computed(dx_stats, call, x, w, dy), self._computed(dw_stats, call, x, w, dy), None
        lacks_dx, lacks_dw = needs_dx and dx is None, needs_dw and dw is None
        if lacks_dx or lacks_dw:
            self._make_room(dx_stats if lacks_dx else None)
            self._make_room(dw_stats if lacks_dw else None)
            torchs_dx, torchs_dw, db = following(dy, x, w, bias_sizes, *geometry, [lacks_dx, lacks_dw, needs_db])
            dx, dw = torchs_dx if lacks_dx else dx, torchs_dw if lacks_dw else dw
        elif needs_db:
            db = dy.sum((0, *range(2, dy.dim())))
        self._account(timed, began)
        return dx, dw, db

    def _call(
        self, x: Tensor, w: Tensor, geometry: Sequence[Any], *, is_forward: bool = False
    ) -> DispatchedCall | int | None:
        """Look up or describe a call by its shapes, strides and geometry; return None for calls that are never tuned.

        Never tuned are calls with unsupported dtypes or no samples, and invalid calls, which torch rejects. Returns the
        hash of the layer for a forward call that is only to be timed.
        """
        if self.is_deciding:
            with self._lock:
                pass  # wait until no other thread tunes a problem or makes a choice
        stride, padding, dilation, is_transposed, output_padding, groups = geometry
        layer = (w.shape, w.stride(), x.dtype, x.device, torch.get_num_threads(), is_transposed, groups)
        layer = (*layer, *stride, *padding, *dilation, *output_padding)
        key = x.shape, x.stride(), layer
        try:
            return self.calls[key]
        except KeyError:
            call, hashed, hashed_layer = None, hash(key), hash(layer)
        if is_forward and self._is_only_timed(hashed, hashed_layer, x, w):
            if len(self.only_timed) >= _MOST_KEPT:
                self.only_timed.clear()
                self.first_s.clear()
            self.only_timed[hashed] = self.only_timed.get(hashed, 0) + 1
            return hashed_layer
        problem = problem_of_call(
            x, w, stride, padding, dilation, groups, is_transposed=is_transposed, output_padding=output_padding
        )
        if problem is not None:
            forward = problem.with_operation(Operation.FORWARD)
            call = DispatchedCall(forward, len(x), x.device, x.dim() == 3, is_transposed)
        else:
            kind = f"{x.dtype} on {x.device.type}, or not a convolution of images or volumes"
            self.passed_by[kind] += 1
        if len(self.calls) >= _MOST_KEPT:
            self.calls.clear()
        self.calls[key] = call

        # The calls that were only timed count from now on.
        stats = None if call is None else self._stats_of(call, Operation.FORWARD)
        if stats is not None:
            stats.calls += self.only_timed.get(hashed, 0)
            self._described[hashed_layer] = stats.layer
            self.untuned_s[stats.layer] += self.first_s.pop(hashed_layer, 0.0)
        self.only_timed.pop(hashed, None)
        return call

    def _is_only_timed(self, hashed: int, layer: int, x: Tensor, w: Tensor) -> bool:
        """Return whether a call is only to be timed: of its layer nothing is stored, tuned or due.

        hashed, layer: the hashes of the call and of its layer.
        """
        described = self._described.get(layer, ())
        if not x.is_cpu or self._settled.get(described) or self.workshop.may_know(w.shape, x.device):
            return False
        share = _DESCRIBED if hashed in self.only_timed else 1.0
        return self.first_s.get(layer, 0.0) + self.untuned_s.get(described, 0.0) < share * PATIENCE * self.expected_s

    def _computed(
        self,
        stats: ShapeStats | None,
        call: DispatchedCall,
        x: Tensor,
        w: Tensor,
        dy: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor | None:
        """Return the result of a call for a problem by the choice; None if torch's convolution is to run."""
        if stats is None or stats.choices is None:
            return None
        p, operation = call.problem, stats.problem.operation
        third = bias if operation is Operation.FORWARD else dy
        with untouched:
            if call.is_transposed:
                third = None if operation is Operation.FORWARD else x
                dense = torch_format(p)
                if dy is None:  # only the shape is read of the operand in the result's place
                    shape = p.x_shape(call.batch_size)
                    x = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=dense)
                else:
                    x = _as_images(dy).contiguous(memory_format=dense)
            third = None if third is None else _as_images(third)
            geometry = p.stride, p.padding, p.dilation, p.groups
            result = operators.computed(operation, _as_images(x), _as_images(w), third, geometry, stats.choices)
        if result is None:
            return None
        stats.ours += 1
        return result.squeeze(2) if call.is_1d else result

    def _counted(self, *problems: ShapeStats | None) -> list[ShapeStats]:
        """Count a call for each of its problems and decide on those that are due; return those to be timed in it."""
        present = [stats for stats in problems if stats is not None]
        for stats in present:
            stats.calls += 1
        return [stats for stats in present if stats.calls >= stats.ask_at and self.decide(stats)]

    def _now(self, device: torch.device) -> float:
        """Return the time at which a device has done its work so far."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self.clock()

    def _account(self, timed: Sequence[ShapeStats], began: float) -> None:
        """Add the seconds of a timed call to the layers of its problems, for all calls until the next timed one."""
        if timed:
            share_s = (self._now(timed[0].device) - began) / len(timed)
            with self._lock:
                for stats in timed:
                    stats.call_s = min(stats.call_s, share_s)
                    is_near = any(are_near(stats.problem, settled.problem) for settled in self._settled[stats.layer])
                    self.untuned_s[stats.layer] += stats.call_s * stats.calls * (_NEAR if is_near else 1)

    def _stats_of(self, call: DispatchedCall, call_operation: Operation) -> ShapeStats | None:
        """Return the statistics of an operation of a call; None if the config excludes the operation."""
        if call_operation in call.stats:
            return call.stats[call_operation]
        if call_operation not in self.config.operations:
            call.stats[call_operation] = None
            return None
        operation = problem_operation(call_operation, transposed=call.is_transposed)
        threads = torch.get_num_threads()
        key = (operation, call.problem, call.batch_size, call.device, threads)
        with self._lock:
            if key not in self.sizes:
                if len(self.sizes) >= _MOST_KEPT:
                    self._forget()
                problem = call.problem.with_operation(operation)
                stats = self.sizes[key] = ShapeStats(problem, call.batch_size, call.device, threads)
                self._layers[stats.layer].append(stats)
            call.stats[call_operation] = self.sizes[key]
            return self.sizes[key]

    def _forget(self) -> None:
        """Forget the problems that are not tuned, most of which came once, to make room for others."""
        settled = {key: stats for key, stats in self.sizes.items() if stats.state is State.SETTLED}
        self.passed_by[f"more than {_MOST_KEPT} shapes came, and these were forgotten"] += len(self.sizes) - len(
            settled
        )
        self.sizes = settled
        self.calls.clear()
        self.first_s.clear()
        self.untuned_s.clear()
        self._described = {hashed: layer for hashed, layer in self._described.items() if layer in self._settled}
        self._layers.clear()
        for stats in settled.values():
            self._layers[stats.layer].append(stats)  # what is settled stays in ``_settled``

    def decide(self, stats: ShapeStats) -> bool:
        """Choose the configuration to run for a problem from now on, without side effects on the user's call.

        If that fails, torch's convolution runs. Returns whether the problem is still to be tuned. Raises only Ctrl-C
        and what signal handlers of the program raise.
        """
        if stats.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be measured during capture; the next call tries again
        with self._lock:
            if stats.calls < stats.ask_at:
                return False  # another thread has decided in the meantime
            if stats is self._tells_steps:
                stats.ask_at = stats.calls + _LOOK_CALLS if self.heap is not None and self.heap.look() else inf
                return False
            if self._may_wait(stats):
                if self.untuned_s[stats.layer] >= _PREPARED * PATIENCE * self.expected_s:
                    self.workshop.prepare()
                if stats.state is State.NEW:
                    stats.state = State.WAITING
                    stats.run(_WAITS)
                stats.ask_at = 2 * stats.calls
                return True
            began, self.is_deciding = self.clock(), True
            with warnings_deferred():  # as errors, they would end the tuning
                try:
                    with _aside(stats.device.type):
                        self._decide(stats)
                except Exception as error:
                    raise_interruption(error)
                    self.failures += 1
                    why = f"its tuning failed: {first_line(error)}"
                    self._end(stats, Decision(why=why))
                    say_once(f"{stats.problem}, batch {stats.batch_size}: PyTorch's own convolution runs, {why}")
                finally:
                    self.is_deciding = False
                    self.spent_s += self.clock() - began
            if stats.state is not State.SETTLED:
                return True
            self._try_heap(stats)
            return False

    def _may_wait(self, stats: ShapeStats) -> bool:
        """Return whether what runs may go on: tuning is not due, and for a new size nothing is stored or tuned."""
        if self._is_due(stats) or self.failures >= _MOST_FAILURES:
            return False
        is_stored = self._settled[stats.layer] or self.workshop.may_know(stats.problem.w_shape(), stats.device)
        return stats.state is not State.NEW or not is_stored

    def _is_due(self, stats: ShapeStats) -> bool:
        """Return whether the layer's calls have taken long enough, and this size has come often enough."""
        settled = len(self._settled[stats.layer])
        return self.untuned_s[stats.layer] >= PATIENCE * self.expected_s and stats.calls >= 2**settled

    def _end(self, stats: ShapeStats, decision: Decision, tuned: TunedProblem | None = None) -> None:
        """Run this for good."""
        stats.settle(decision, tuned)
        self._settled[stats.layer].append(stats)

    def _try_heap(self, settled: ShapeStats) -> None:
        """Begin, or begin again, the trial of a kept heap, now that a problem was decided on."""
        if self.heap is not None and self.heap.verdict is None and settled.device.type == "cpu":
            self.heap.begin()
            if self._tells_steps is None and settled.tuned is not None:
                self._tells_steps, settled.ask_at = settled, settled.calls + _LOOK_CALLS

    def _make_room(self, stats: ShapeStats | None) -> None:
        """Free the workspace kept for our algorithms if it and that of torch's next convolution exceed the limit."""
        if self.torchs_limit_bytes is not None and stats is not None and stats.decision.configuration is not None:
            make_room(self.torchs_limit_bytes - stats.decision.configuration.workspace_bytes)

    def _decide(self, stats: ShapeStats) -> None:
        if self.failures >= _MOST_FAILURES:
            self._end(stats, Decision(why=f"tuning of other problems failed {_MOST_FAILURES} times in a row"))
            return
        task = Task(stats.problem, stats.batch_size, self.limit_bytes, baseline_exempt=self.config.baseline_exempt)

        # At its first call, a size has what the database has.
        if stats.state is State.NEW:
            may_have = self.workshop.may_have(stats.problem, stats.device)
            stored = self.workshop.look_up(task, stats.device) if may_have else None
            if stored is not None:
                self._settle(stats, stored, Origin.DATABASE)
                return
            stats.state = State.WAITING
            if not self._settled[stats.layer]:
                for tuned in self.workshop.look_up_nearest(task, stats.device):
                    self._recall(tuned, stats)

        if not self._is_due(stats):
            stats.ask_at = 2 * stats.calls
            self._run_nearest(stats)
            return

        # Tune it now.
        began, self.untuned_s[stats.layer] = self.clock(), 0.0
        try:
            tuned = self.workshop.tune(task, stats.device)
        except InfeasibleError as error:  # the user's call must still return a result
            self._end(stats, Decision(why=first_line(error)))
            return
        finally:
            self.expected_s = (self.expected_s + self.clock() - began) / 2
        self.failures = 0
        self._settle(stats, tuned, Origin.MEASURED)

    def _recall(self, tuned: TunedProblem, near: ShapeStats) -> None:
        """Settle a size of the layer that has not come yet by what is stored for it."""
        forward = tuned.problem.with_operation(Operation.FORWARD)
        key = tuned.problem.operation, forward, tuned.batch_size, near.device, near.threads
        if key not in self.sizes:
            stats = self.sizes[key] = ShapeStats(tuned.problem, tuned.batch_size, near.device, near.threads)
            self._layers[stats.layer].append(stats)
            self._settle(stats, tuned, Origin.DATABASE)

    def _settle(self, stats: ShapeStats, tuned: TunedProblem, origin: Origin) -> None:
        """Run the choice for a size, and that of the nearest tuned size for the layer's untuned sizes."""
        self._end(stats, Decision.of(tuned, origin), tuned)
        for size in self._layers[stats.layer]:
            if size.state is not State.SETTLED:
                self._run_nearest(size)

    def _run_nearest(self, stats: ShapeStats) -> None:
        """Run what derives from the nearest tuned size, or torch's convolution, until this size is tuned."""
        tuned = [size.tuned for size in self._settled[stats.layer] if size.tuned is not None]
        stats.run(nearest(stats.problem, stats.batch_size, tuned, stats.device.type) or _WAITS)

    def status(self) -> Status:
        """Return the status of all problems seen so far, in the order of their first calls."""
        with self._lock:
            called = (stats for stats in self.sizes.values() if stats.calls)  # not only looked up, as near to others
            problems = tuple(replace(stats, choices=None, tuned=None) for stats in called)
            heap = None if self.heap is None or self._tells_steps is None else self.heap.verdict
        return Status(problems, self.spent_s, tuple(self.passed_by.items()), heap, len(self.only_timed))


def _as_images(tensor: Tensor) -> Tensor:
    """Return a tensor without height as images of height 1, made contiguous as torch does; others as they are."""
    return tensor.contiguous().unsqueeze(2) if tensor.dim() == 3 else tensor


@contextmanager
def _aside(device_type: str) -> Iterator[None]:
    """Disable autocast, inference mode, function modes and hooks of saved tensors inside the block.

    Convolutions in the block are torch's, without any wrappers. The previous state is restored at the end.
    """

    def itself(tensor: Tensor) -> Tensor:
        return tensor

    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # torch calls only the last ones
    last_hooks = torch.autograd.graph.saved_tensors_hooks(itself, itself) if has_hooks else nullcontext()
    mode, autocast = torch.inference_mode(False), torch.autocast(device_type, enabled=False)
    with untouched, torch._C.DisableTorchFunction(), mode, autocast, last_hooks:
        yield
