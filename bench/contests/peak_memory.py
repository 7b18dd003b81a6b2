"""Measures the peak memory of a training step: in torch's allocator, and resident in the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mucudnn.bench.contests.apart import Apart, Ready
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.running.workspace import release_workspaces
from mucudnn.tracing.training_step import training_step
from mucudnn.words.errors import UnavailableError

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}  # glibc's; see mallopt(3)


def has_resident_peak(device_type: str) -> bool:
    """Whether a step's memory is that of the process: resident memory says nothing about a GPU's."""
    return device_type == "cpu"


def allocator_peak_bytes(step: Callable[[], object], device_type: str = "cpu") -> int:
    """Most bytes that ``step`` has in use at once in torch's allocator, on top of what was there and stays.

    The workspace that mucudnn keeps on the CPU is given back before, so that it counts. A first step is not counted,
    since libraries create in it what they keep. On CUDA the current device is measured. Its cache is emptied before:
    which blocks are cached changes how much of them is used.
    """
    step()
    release_workspaces()
    if device_type == "cuda":
        torch.cuda.empty_cache()
    return peak_allocated_bytes(step, device_type)


def resident_peak_bytes(model: nn.Module, sample_input: Any, *, is_compiled: bool = False) -> int:
    """Largest resident memory of a fresh process in a training step. The model and what is made once are in it, too.

    A first step is not counted, in which libraries create what they keep. is_compiled: the model is compiled in that
    step: what ``torch.compile`` needs meanwhile is not counted, but what it leaves in the process is.

    The process gives every freed block of a MiB or more back to the system at once. By default glibc keeps up to 32 MiB
    of each kind, and fragments of them. Those differ by a fifth from run to run, in torch's own step too.

    Raises ``UnavailableError`` where this is not Linux, and for models that cannot be pickled, and ``OwnProcessError``
    where the step fails.
    """
    if not _RESET.exists():
        raise UnavailableError("peak resident memory is read from /proc, which only Linux has: ask for 0 runs")
    with Apart() as apart, _environment(_GIVING_BACK):
        handed = apart.handed((model, sample_input))
        return apart.start(partial(_resident_peak, handed, torch.get_num_threads(), is_compiled)).found


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started meanwhile."""
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


def _resident_peak(handed: Callable[[], tuple[nn.Module, Any]], threads: int, is_compiled: bool) -> Ready[int]:
    torch.set_num_threads(threads)
    model, sample_input = handed()
    step = repeatable_step(torch.compile(model) if is_compiled else model, sample_input)
    step()
    _RESET.write_text("5")  # the peak begins again at what is resident now
    step()
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return Ready(step, int(line.split()[1]) * 2**10)


def repeatable_step(model: Any, sample_input: Any) -> Callable[[], None]:
    """A training step without an optimizer that leaves the gradients ``None``; see ``training_step``."""
    arguments = sample_input if isinstance(sample_input, tuple) else (sample_input,)

    def step() -> None:
        training_step(model, arguments)
        model.zero_grad(set_to_none=True)

    return step
