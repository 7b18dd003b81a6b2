"""Measures the peak memory of a step of a model: in torch's allocator, and as resident memory of a process."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from mucudnn.bench.contests.apart import Apart, Ready
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.running.workspace import release_workspaces
from mucudnn.tracing.training_step import training_step
from mucudnn.words.errors import UnavailableError

T = TypeVar("T")
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}  # glibc: see mallopt(3)


def has_resident_peak(device_type: str) -> bool:
    """Return whether training steps on this device use the process's resident memory: on the CPU, not on a GPU."""
    return device_type == "cpu"


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


def resident_peak_bytes(model: nn.Module, sample_input: Any, *, is_compiled: bool = False, trains: bool = True) -> int:
    """Return the peak resident bytes of a new process during a step, including the bytes of the model.

    The process first runs a warm-up step, whose peak is ignored. is_compiled: compile the model in the warm-up, so that
    the temporary memory of ``torch.compile`` is ignored, too. trains: see ``repeatable_step``.

    The process returns freed blocks of 1 MiB and more to the system at once. By default glibc keeps up to 32 MiB of
    freed memory, and fragments, which made the peak vary by a fifth from run to run, even with PyTorch's own
    convolutions.

    Raises ``UnavailableError`` on systems other than Linux and for models that cannot be pickled, and
    ``OwnProcessError`` if the step fails.
    """
    if not _RESET.exists():
        raise UnavailableError("peak resident memory is read from /proc, which only Linux has: ask for 0 runs")
    with Apart() as apart, _environment(_GIVING_BACK):
        handed = apart.handed((model, sample_input))
        return apart.start(partial(_resident_peak, handed, torch.get_num_threads(), is_compiled, trains)).found


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started within this context, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def resident_growth(call: Callable[[], T]) -> tuple[T, int | None]:
    """Call a function for the first time; return its result, and the bytes by which the process grew meanwhile.

    mucudnn's workspace is released before, and so is what the C library keeps. None on systems other than Linux.
    """
    if not _RESET.exists():
        return call(), None
    release_workspaces()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_bytes("VmRSS")
    _RESET.write_text("5")
    result = call()
    return result, max(_status_bytes("VmHWM") - before, 0)


def _status_bytes(field: str) -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 2**10


def _resident_peak(
    handed: Callable[[], tuple[nn.Module, Any]], threads: int, is_compiled: bool, trains: bool
) -> Ready[int]:
    torch.set_num_threads(threads)
    model, sample_input = handed()
    step = repeatable_step(torch.compile(model) if is_compiled else model, sample_input, trains=trains)
    step()
    _RESET.write_text("5")  # Reset the peak to the current resident size.
    step()
    return Ready(step, _status_bytes("VmHWM"))


def repeatable_step(model: Any, sample_input: Any, *, trains: bool = True) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass and resets gradients to None, without an optimizer.

    trains: if false, the function only calls the model, and records no gradients.
    """
    arguments = sample_input if isinstance(sample_input, tuple) else (sample_input,)

    def step() -> None:
        training_step(model, arguments)
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def call() -> None:
        model(*arguments)

    return step if trains else call
