"""Measures what a call takes, often a training step: its peak memory, and the time of its parts.

``InPlaceTimes`` times the convolutions while the model runs. Normalization, activation, pooling and linear layers are
recognized by the name of the torch operator, in forward and backward passes. In compiled models only convolutions are
recognized.

Steps take longer while their parts are timed, so their total is not reported as the time of a step.
"""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.bench.results.bounds import kind_of_layer
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.measuring.clocks import Clock
from mucudnn.measuring.heap import with_resident_bytes
from mucudnn.measuring.turns import Runner, T, here
from mucudnn.optimizing.steps import InPlaceTimes
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


@dataclass(frozen=True, slots=True)
class StepSplit:
    """The seconds of the parts of a training step: forward convolutions, backward convolutions, and the rest."""

    forward_s: float
    backward_s: float
    rest_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.rest_s

    @classmethod
    def median(cls, samples: Sequence[Self]) -> Self:
        """Return a split with the median of each part. samples: at least one split."""
        return cls(
            forward_s=median(one.forward_s for one in samples),
            backward_s=median(one.backward_s for one in samples),
            rest_s=median(one.rest_s for one in samples),
        )


class StepSplitter:
    """A recorder that splits the time of training steps into convolutions and the rest.

    Its samples are interleaved with those of a ``Timer``. runner: runs the steps and reads the clock.
    """

    def __init__(self, step: Callable[[], object], clock: Clock, runner: Runner = here, device: str = "cpu") -> None:
        """Prepare for recording. Raises ``UnavailableError`` if the model's convolutions cannot be timed."""
        self.step, self.clock, self.runner = step, clock, runner
        self.times = InPlaceTimes(device)
        self._is_warm = False

    def sample(self, steps: int) -> StepSplit:
        """Run ``steps`` steps and return the mean seconds of their parts. The first call starts with a warm-up step.

        Raises any error of a step, and ``UnavailableError`` if convolutions cannot be recorded.
        """
        if not self._is_warm:
            self._split(1)
            self._is_warm = True
        return self._split(steps)

    def _split(self, steps: int) -> StepSplit:
        with self.times.recording():
            elapsed_s = self.runner(lambda: self.clock.time(self.step, steps))
        forward_s = backward_s = 0.0
        for place, spent in self.times.take().items():
            if place.in_backward:
                backward_s += spent.time_s
            else:
                forward_s += spent.time_s
        return StepSplit(forward_s / steps, backward_s / steps, (elapsed_s - forward_s - backward_s) / steps)


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


class KindTimes:
    """A recorder that splits the time of a model's calls on the CPU by kind of layer.

    clock: times the whole call. runner: makes the calls. is_compiled: whether the model is compiled.
    """

    def __init__(
        self, call: Callable[[], object], clock: Clock, runner: Runner = here, *, is_compiled: bool = False
    ) -> None:
        """Prepare for recording. Raises ``UnavailableError`` if the model's convolutions cannot be timed."""
        self.call, self.clock, self.runner, self.is_compiled = call, clock, runner, is_compiled
        self.times = InPlaceTimes("cpu")

    def sample(self) -> dict[str, float]:
        """Call the model once; return the seconds of each kind of layer and of the rest.

        Raises any error of the call, and ``UnavailableError`` if convolutions cannot be recorded.
        """
        operators = _Operators(self.times)

        def watched() -> None:
            with operators:
                self.call()

        call = self.call if self.is_compiled else watched  # Under a dispatch mode, compiled models run uncompiled.
        with self.times.recording():
            elapsed_s = self.runner(lambda: self.clock.time(call, 1))
        spent_s = operators.spent_s
        for place, spent in self.times.take().items():
            spent_s[OTHER_CONVOLUTION if place.problem is None else kind_of_layer(place.problem)] += spent.time_s
        found = dict(spent_s)
        found[REST] = max(0.0, elapsed_s - sum(found.values()))
        return found


def median_by_kind(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median seconds of each kind of layer over all samples, in descending order, with the rest last.

    The result is empty if there are no samples.
    """
    every = dict.fromkeys(kind for sample in samples for kind in sample)
    kinds = {kind: median(sample.get(kind, 0.0) for sample in samples) for kind in every}
    return dict(sorted(kinds.items(), key=lambda item: (item[0] == REST, -item[1])))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A torch dispatch mode that times every operator except convolutions. spent_s: seconds by kind of layer."""

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
