"""Measures what a call takes, often a training step: its peak memory, and the time of its parts.

``StepTimes`` times the convolutions while the model runs. Normalization, activation, pooling and linear layers are
recognized by the name of the torch operator, in forward and backward passes. In compiled models, and where norms run as
groups, only convolutions are recognized.

Steps take longer while their parts are timed, so their total is not reported as the time of a step.
"""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.bench.results.bounds import kind_of_layer
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.measuring.clocks import Clock
from mucudnn.measuring.heap import with_resident_bytes
from mucudnn.measuring.turns import Runner, T, here
from mucudnn.optimizing.steps import InPlaceTimes, StepCall
from mucudnn.running.workspace import release_workspaces


def allocator_peak_bytes(step: Callable[[], object], device_type: str = "cpu") -> int:
    """Return the peak bytes that torch's allocator holds during ``step``, beyond those allocated before the step.

    A warm-up step runs first, in which libraries allocate the memory that they keep. Then mucudnn's CPU workspace is
    released, so that it counts towards the peak, and the cache of the current CUDA device is emptied, because cached
    blocks change the peak.
    """
    step()
    release_workspaces()
    if device_type == "cuda":
        torch.cuda.empty_cache()
    return peak_allocated_bytes(step, device_type)


def resident_growth(call: Callable[[], T]) -> tuple[T, int | None]:
    """Call a function for the first time; return its result, and the bytes by which the process grew meanwhile.

    mucudnn's workspace is released before, and so is what the C library keeps. None on systems other than Linux.
    """
    release_workspaces()
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    result, before, peak = with_resident_bytes(call)
    return result, max(peak - before, 0) if before else None


NORMALIZATION, ACTIVATION, POOLING, LINEAR, REST = "normalization", "activation", "pooling", "linear", "rest"
OTHER_CONVOLUTION = "other convolution"  # a convolution that ``ConvProblem`` cannot describe

# Substrings of torch operator names, such as ``layer_norm_backward`` and ``threshold_backward``.
_PARTS: Mapping[str, tuple[str, ...]] = {
    NORMALIZATION: ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "local_response_norm"),
    POOLING: ("pool",),
    ACTIVATION: (
        *("relu", "threshold", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "mish", "elu", "softplus"),
        *("sigmoid", "tanh", "glu"),
    ),
}
_PRODUCTS = {"linear", "addmm", "mm", "bmm", "baddbmm", "addmv", "mv", "matmul"}  # words that occur in operator names


def kind_of_operator(name: str) -> str:
    """Return the kind of layer that a torch operator belongs to, judging by its name; ``rest`` for all others.

    >>> kind_of_operator("layer_norm_backward"), kind_of_operator("addmm"), kind_of_operator("add_")
    ('normalization', 'linear', 'rest')
    """
    if "scaled_dot_product" in name or _PRODUCTS & set(re.split("[._]", name)):
        return LINEAR
    return next((kind for kind, parts in _PARTS.items() if any(part in name for part in parts)), REST)


# Columns of the parts of a step in result folders.
FORWARD_S, BACKWARD_S, REST_S = "forward_convolutions_s", "backward_convolutions_s", "rest_s"


class StepTimes:
    """A recorder that splits the time of calls, such as training steps: into convolutions and the rest, or by layer.

    Its samples are interleaved with those of a ``Timer``.
    """

    def __init__(
        self,
        call: Callable[[], object],
        clock: Clock,
        runner: Runner = here,
        *,
        device: str = "cpu",
        sees_operators: bool = True,
    ) -> None:
        """Prepare for recording. Raises ``UnavailableError`` if the model's convolutions cannot be timed.

        clock: times whole calls.
        runner: makes the calls, and reads the clock.
        sees_operators: whether the operators may be watched, which changes what runs if the model is compiled or its
            norms run as groups.
        """
        self.call, self.clock, self.runner, self.sees_operators = call, clock, runner, sees_operators
        self.convolutions = InPlaceTimes(device)
        self._is_warm = False

    def parts(self, calls: int) -> dict[str, float]:
        """Make ``calls`` calls; return the mean seconds of their parts by column. A warm-up call precedes the first.

        Raises any error of a call, and ``UnavailableError`` if convolutions cannot be recorded.
        """
        if not self._is_warm:
            self._record(self.call, 1)
            self._is_warm = True
        elapsed_s, spent_s = self._record(self.call, calls)
        parts_s = {FORWARD_S: 0.0, BACKWARD_S: 0.0}
        for place, seconds in spent_s.items():
            parts_s[BACKWARD_S if place.in_backward else FORWARD_S] += seconds
        parts_s[REST_S] = elapsed_s - sum(parts_s.values())
        return {name: seconds / calls for name, seconds in parts_s.items()}

    def kinds(self) -> dict[str, float]:
        """Make one call, on the CPU; return the seconds of each kind of layer and of the rest. Raises as ``parts``."""
        operators = _Operators(self.convolutions)

        def watched() -> None:
            with operators:
                self.call()

        # Under a dispatch mode, compiled models run uncompiled, and norms by torch's operators.
        elapsed_s, spent_s = self._record(watched if self.sees_operators else self.call, 1)
        kinds_s = operators.spent_s
        for place, seconds in spent_s.items():
            kinds_s[OTHER_CONVOLUTION if place.problem is None else kind_of_layer(place.problem)] += seconds
        rest_s = max(0.0, elapsed_s - sum(kinds_s.values()))
        return {**kinds_s, REST: rest_s}

    def _record(self, call: Callable[[], object], calls: int) -> tuple[float, dict[StepCall, float]]:
        """Return the seconds of the calls, and those of their convolutions by place."""
        with self.convolutions.recording():
            elapsed_s = self.runner(lambda: self.clock.time(call, calls))
        return elapsed_s, {place: spent.time_s for place, spent in self.convolutions.take().items()}


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each key over all samples, of which those without the key count as 0."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: median(sample.get(name, 0.0) for sample in samples) for name in names}


def median_by_kind(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each kind of layer over all samples, in descending order, with the rest last.

    The result is empty if there are no samples.
    """
    return dict(sorted(medians(samples).items(), key=lambda kind: (kind[0] == REST, -kind[1])))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A torch dispatch mode that times every operator except convolutions.

    spent_s: seconds by kind of layer.
    """

    def __init__(self, convolutions: InPlaceTimes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.convolutions = convolutions
        self.spent_s: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = REST if self.convolutions.is_inside else kind_of_operator(function.__name__)
        if kind == REST:
            return function(*args, **(kwargs or {}))
        begun_s = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        self.spent_s[kind] += time.perf_counter() - begun_s
        return result
