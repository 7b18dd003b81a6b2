"""Times of each convolution in place: within a step of the model, with that step's operands, caches and heap.

Torch's own calls are recorded in torch's dispatcher (``dispatcher``), ours in the operators, whose functions
are replaced during the recording. On a GPU, events of the current stream replace the clock. Not run on a GPU yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.running import operators
from mucudnn.running.dispatcher import Kernel, Wrapper, torchs_kernel, wrapped
from mucudnn.running.problems import problem_of_call

_Result = TypeVar("_Result")
_ALONE = {operation: (operation,) for operation in Operation}
_FORWARD, _DATA, _FILTER = _ALONE.values()


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a convolution in a step of the model: its problem, the operations of one call, and the pass.

    problem: the forward problem; None if no problem describes the call. operations: operations that one call computes;
    torch computes dx and dw in one call, and the forward pass of a transposed convolution is backward data.
    """

    problem: ConvProblem | None
    batch_size: int
    operations: tuple[Operation, ...]
    in_backward: bool


@dataclass(frozen=True, slots=True)
class Spent:
    """Number of calls at one place of a step, and their total seconds."""

    calls: int
    time_s: float


class InPlaceTimes:
    """Recorder of the convolutions on one type of device, active within ``recording``.

    ``take`` returns the times of the recorded calls. Raises ``UnavailableError`` if this torch does not give access to
    its kernels.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._on_cpu = device_type == "cpu"
        self._now: Callable[[], Any] = time.perf_counter if self._on_cpu else _event
        self._places: dict[tuple[Any, ...], Place] = {}
        self._calls: list[tuple[Place, int, Any, Any]] = []
        self._thread = _OfThisThread()
        self._wrapper = _torchs(self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all convolution calls of all threads inside the block; only one recorder is active at a time.

        Convolutions that mucudnn does not compute run torch's own kernel, bypassing other wrappers in torch's
        dispatcher.
        """
        with _one_at_a_time, wrapped(self._wrapper), _ours(self):
            yield

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in a convolution call that is being recorded."""
        return self._thread.inside

    def take(self) -> dict[Place, Spent]:
        """Wait for the recorded calls to finish; return number and time of the calls since the last ``take``."""
        calls, self._calls = self._calls, []
        if not self._on_cpu:
            torch.cuda.synchronize()
        spent: dict[Place, Spent] = {}
        for place, count, begun, ended in calls:
            time_s = ended - begun if self._on_cpu else begun.elapsed_time(ended) / 1000
            before = spent.get(place, Spent(0, 0.0))
            spent[place] = Spent(before.calls + count, before.time_s + time_s)
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

        On None nothing is recorded, since the caller runs and records a fallback next. x, w, geometry: describe the
        problem; x is None if the call computes x.
        """
        if self._thread.inside:
            return compute(*arguments)
        result, *times = self._timed(compute, arguments)
        if result is not None:
            self._thread.last = self._place(operations, result if x is None else x, w, *geometry)
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

    def _place(
        self,
        operations: tuple[Operation, ...],
        x: Any,
        w: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Place:
        """Look up the place of a call, which takes 1 to 2 microseconds, most of the overhead of recording."""
        in_backward = torch._C._current_graph_task_id() >= 0
        geometry = tuple(stride), tuple(padding), tuple(dilation), groups
        key = (operations, in_backward, x.shape, x.stride(), x.dtype, w.shape, w.stride(), geometry)
        place = self._places.get(key)
        if place is None:
            problem = problem_of_call(x, w, stride, padding, dilation, groups)
            place = self._places[key] = Place(problem, len(x) if x.dim() else 0, operations, in_backward)
        return place


class _OfThisThread(threading.local):
    inside = False  # whether in a recorded call
    last: Place | None = None


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


_one_at_a_time = threading.Lock()


def _torchs(times: InPlaceTimes) -> Wrapper:
    device_type = times.device_type
    own, own_backward = (torchs_kernel(name, device_type) for name in ("convolution", "convolution_backward"))

    def forward(following: Kernel, *arguments: Any) -> Any:
        x, w, _, stride, padding, dilation, transposed, _, groups = arguments
        if x.device.type != device_type:
            return following(*arguments)
        operations = _DATA if transposed else _FORWARD
        return times.record(own, arguments, operations, None if transposed else x, w, stride, padding, dilation, groups)

    def backward(following: Kernel, *arguments: Any) -> Any:
        dy, x, w, _, stride, padding, dilation, transposed, _, groups, (of_x, of_w, _) = arguments
        if x.device.type != device_type:
            return following(*arguments)
        operations = (_FORWARD if transposed else _DATA) * of_x + _FILTER * of_w
        x = dy if transposed else x
        return times.record(own_backward, arguments, operations, x, w, stride, padding, dilation, groups)

    return Wrapper(forward, backward)


@contextmanager
def _ours(times: InPlaceTimes) -> Iterator[None]:
    """Replace the functions that compute our convolutions by recording functions."""
    computed, values = operators.computed, operators._values

    def recorded_values(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, rest: Any) -> Tensor:
        return times.record(values, (operation, x, w, third, rest), _ALONE[operation], x, w, *rest[:-1])

    def recorded(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, geometry: Any, *rest: Any) -> Any:
        return times.record(computed, (operation, x, w, third, geometry, *rest), _ALONE[operation], x, w, *geometry)

    places: tuple[tuple[Any, dict[str, Any]], ...] = (
        (operators, {"computed": recorded}),
        (operators, {"bias_gradient": partial(times.record_more, operators.bias_gradient)}),
        (operators, {"_values": recorded_values, "_compiled": None}),  # None: each gradient is computed separately
    )
    with ExitStack() as stack:
        for owner, functions in places:
            for name, function in functions.items():
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, function)
        yield
