"""Sessions, which choose for each problem: its tuned configuration, the nearest tuned size's, or torch's convolution.

The first size of a layer (its problem without batch size, height and width) is measured at the first call. Usually all
calls have that size, so training is tuned in its first step. Once k sizes of the layer are known, another size is
measured only after 2**k calls, so at most log2(n) sizes are measured in n calls: a smaller last batch or varying image
sizes cost little. Until a size is measured, the choice of the nearest size runs. Stored results are used immediately.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf
from time import monotonic

import torch
from torch import Tensor

from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError, first_line, say_once, warnings_deferred
from mucudnn.core.problem import Operation
from mucudnn.core.records import Task
from mucudnn.enabling.calls import DispatchedCall, call_of
from mucudnn.enabling.status import Origin, ShapeStats, Status
from mucudnn.enabling.workshop import Workshop, nearest
from mucudnn.running.dispatcher import untouched
from mucudnn.running.workspace import make_room


@contextmanager
def aside(device_type: str) -> Iterator[None]:
    """Disable autocast, inference mode, function modes and hooks of saved tensors inside the block.

    Convolutions in the block are torch's, without any wrappers. The previous state is restored at the end.
    """
    with ExitStack() as stack:
        stack.enter_context(untouched)
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # torch calls only the last hooks
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        yield


def _itself(tensor: Tensor) -> Tensor:
    return tensor


_MOST_KEPT = 4096  # shapes, so that memory stays bounded
_MOST_FAILURES = 3  # consecutive ones, so that a permanent fault, such as a locked file, does not delay every layer


class Session:
    """Session of tuning under one config: the convolution calls seen so far, and the choices for their problems.

    calls: by shapes, strides and geometry; None for calls that are never tuned. met: statistics by problem, batch size,
    device and number of threads. passed_by: number of shapes that are never tuned, by reason. spent_s: time of look-ups
    and measurements. failures: number of tuning errors since the last success. is_deciding: whether other threads must
    wait before they compute, so that they do not disturb a measurement.
    """

    def __init__(self, config: Config, workshop: Workshop | None = None, clock: Callable[[], float] = monotonic):
        self.config, self.clock = config, clock
        self.workshop = workshop or Workshop(config)
        self.limit_bytes = config.workspace_limit_bytes
        self.torchs_limit_bytes = None if config.baseline_exempt else self.limit_bytes
        self.calls: dict[tuple[object, ...], DispatchedCall | None] = {}
        self.met: dict[tuple[object, ...], ShapeStats] = {}
        self.passed_by: Counter[str] = Counter()
        self.spent_s = 0.0
        self.is_deciding = False
        self.failures = 0
        self._layers: dict[tuple[object, ...], list[ShapeStats]] = {}
        self._lock = threading.RLock()

    def meet(self, key: tuple[object, ...], x: Tensor, w: Tensor, *geometry: object) -> DispatchedCall | None:
        """Store a description of a call with a new shape under ``key``; return it, or None for calls never tuned.

        geometry: see ``call_of``.
        """
        call = call_of(x, w, *geometry)  # type: ignore[arg-type]
        if call is None:
            self.passed_by[_why_never(x)] += 1
        if len(self.calls) >= _MOST_KEPT:
            self.calls.clear()
        self.calls[key] = call
        return call

    def met_as(self, operation: Operation, call: DispatchedCall, of_call: Operation | None = None) -> ShapeStats | None:
        """Return the statistics of an operation of a call; None if the config excludes the operation.

        of_call: the caller's operation, to which the config refers, if it differs, as in transposed calls.
        """
        if (of_call or operation) not in self.config.operations:
            return None
        key = (operation, call.problem, call.batch_size, call.device, threads := torch.get_num_threads())
        if key not in self.met:
            if len(self.met) >= _MOST_KEPT:
                self.passed_by["too many shapes"] += 1
                return None
            new = ShapeStats(call.problem.with_operation(operation), call.batch_size, call.device, threads)
            with self._lock:
                self._layers.setdefault(new.layer, []).append(self.met.setdefault(key, new))
        return self.met[key]

    def decide(self, met: ShapeStats) -> None:
        """Choose the configuration to run for a problem from now on, without side effects on the user's call.

        Raises only Ctrl-C.
        """
        if met.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # nothing can be measured during capture; the next call tries again
        with self._lock:
            if met.calls >= met.ask_at:  # another thread may have decided in the meantime
                self._timed(met)

    def make_room(self, met: ShapeStats | None) -> None:
        """Free the workspace kept for our algorithms if it and that of torch's next convolution exceed the limit."""
        if self.torchs_limit_bytes is not None and met is not None and met.configuration is not None:
            make_room(self.torchs_limit_bytes - met.configuration.workspace_bytes)

    def wait(self) -> None:
        """Wait until no other thread tunes a problem or makes a choice."""
        with self._lock:
            pass

    def _timed(self, met: ShapeStats) -> None:
        """Decide for a problem; if that fails, torch's convolution runs."""
        began, self.is_deciding = self.clock(), True
        with warnings_deferred():  # as errors, they would end the tuning
            try:
                with aside(met.device.type):
                    self._decide(met)
            except Exception as error:
                self.failures += 1
                met.has_failed, met.ask_at = True, inf
                met.use_torchs_own(f"its tuning failed: {first_line(error)}")
                say_once(f"{met.problem}, batch {met.batch_size}: PyTorch's own convolution runs, {met.why}")
            finally:
                self.is_deciding = False
                self.spent_s += self.clock() - began

    def _decide(self, met: ShapeStats) -> None:
        if self.failures >= _MOST_FAILURES:
            met.ask_at = inf
            met.use_torchs_own(f"tuning of other problems failed {_MOST_FAILURES} times in a row")
            return
        if not met.was_looked_up:
            met.was_looked_up = True
            stored = self.workshop.look_up(self._task(met), met.device)
            if stored is not None:
                met.use(stored, Origin.DATABASE)
                self._spread(met)
                return
        known = sum(one.tuned is not None or one.has_failed for one in self._layers[met.layer])
        if met.calls < 2**known:
            met.ask_at = 2**known
            self._use_nearest(met)
            return
        try:
            tuned = self.workshop.tune(self._task(met), met.device)
        except InfeasibleError as error:  # the user's call must still return a result
            met.ask_at = inf
            met.use_torchs_own(first_line(error))
            return
        met.use(tuned, Origin.MEASURED)
        self.failures = 0
        self._spread(met)

    def _spread(self, tuned: ShapeStats) -> None:
        """Apply the choice of the nearest tuned size to the layer's untuned sizes, after one size was tuned."""
        for other in self._layers[tuned.layer]:
            if other.tuned is None and not other.has_failed:
                self._use_nearest(other)

    def _use_nearest(self, met: ShapeStats) -> None:
        tuned = [one.tuned for one in self._layers[met.layer] if one.tuned is not None]
        found = nearest(met.problem, met.batch_size, tuned, met.device.type)
        if found is not None:
            met.use_nearest(*found)
        else:
            met.use_torchs_own(f"to be measured at call {met.ask_at}")

    def _task(self, met: ShapeStats) -> Task:
        return Task(met.problem, met.batch_size, self.limit_bytes, baseline_exempt=self.config.baseline_exempt)

    def status(self) -> Status:
        """Return the status of all problems seen so far, in the order of their first calls."""
        with self._lock:
            problems = tuple(replace(met, choices=None, tuned=None) for met in self.met.values())
        return Status(problems, self.spent_s, tuple(self.passed_by.items()))


def _why_never(x: Tensor) -> str:
    if x.dim() == 5:
        return "three dimensions"
    return f"{x.dtype} on {x.device.type}, or not a convolution of images"
