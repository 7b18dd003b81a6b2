"""Gets the training step of one contestant ready, in a place of its own: see ``apart``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mucudnn.bench.contests.apart import Ready
from mucudnn.bench.contests.peak_memory import allocator_peak_bytes, repeatable_step
from mucudnn.bench.contests.variants import Variant
from mucudnn.measuring.timing.timer import Clock, T
from mucudnn.running.devices import device_of, made_current
from mucudnn.words.torch_settings import searching

Subject = tuple[nn.Module, tuple[Tensor, ...]]  # a model, ours tuned already, and all that it is called with


@dataclass(frozen=True, slots=True)
class StepJob:
    """Gets a step ready: compiles it where it is to be, warms it up, and takes its peak in torch's allocator, in bytes.

    subject: returns the contestant's own copy. threads: of torch. clock: of the steps.

    Called, it returns what is timed, and the peak. Raises whatever compiling and a step raise.
    """

    subject: Callable[[], Subject]
    variant: Variant
    threads: int
    clock: Clock

    def __call__(self) -> Ready[int]:
        torch.set_num_threads(self.threads)
        model, arguments = self.subject()
        called: Any = torch.compile(model) if self.variant.is_compiled else model
        step, device = repeatable_step(called, arguments), device_of(model)
        run = partial(_run, device, self.variant is Variant.TORCH_BENCHMARK)
        return Ready(step, run(lambda: allocator_peak_bytes(step, device.type)), run, self.clock)


def _run(device: torch.device, is_searching: bool, function: Callable[[], T], /) -> T:
    with made_current(device), searching(is_searching):
        return function()
