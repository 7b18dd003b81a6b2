"""Measures the peak memory of a training step: in torch's allocator, and resident in the process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.running.devices import device_of, made_current
from mucudnn.running.workspace import release_workspaces
from mucudnn.tracing.training_step import training_step
from mucudnn.tracing.undisturbed import undisturbed
from mucudnn.words.errors import UnavailableError
from mucudnn.words.units import format_bytes

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}  # glibc's; see mallopt(3)


@dataclass(frozen=True, slots=True)
class PeakComparison:
    """Peaks of a training step in bytes. Ratios are mucudnn to torch: at most 1 if the step needs no more memory.

    Allocator bytes come on top of what is there before the step: parameters, buffers, input. Resident bytes are those
    of the whole process, libraries included; ``None`` if they were not measured.
    """

    torch_allocator_bytes: int
    mucudnn_allocator_bytes: int
    torch_resident_bytes: int | None = None
    mucudnn_resident_bytes: int | None = None

    @property
    def allocator_ratio(self) -> float:
        return self.mucudnn_allocator_bytes / self.torch_allocator_bytes

    @property
    def resident_ratio(self) -> float | None:
        if self.torch_resident_bytes is None or self.mucudnn_resident_bytes is None:
            return None
        return self.mucudnn_resident_bytes / self.torch_resident_bytes

    def __str__(self) -> str:
        lines = [
            f"allocator peak: torch {format_bytes(self.torch_allocator_bytes)}, "
            f"mucudnn {format_bytes(self.mucudnn_allocator_bytes)}, ratio {self.allocator_ratio:.3f}"
        ]
        if self.resident_ratio is not None:
            lines.append(
                f"resident peak:  torch {format_bytes(self.torch_resident_bytes)}, "
                f"mucudnn {format_bytes(self.mucudnn_resident_bytes)}, ratio {self.resident_ratio:.3f}"
            )
        return "\n".join(lines)


def compare_peaks(torch_model: nn.Module, mucudnn_model: nn.Module, sample_input: Any, runs: int = 3) -> PeakComparison:
    """Compare the peaks of both models' training steps on ``sample_input``, one tensor or a tuple of all arguments.

    runs: processes started for each model, in turns; the resident peak is their median; 0: it is not measured. The
    models are left as they were. On CUDA the allocator counts whole blocks, as ``torch.cuda.max_memory_allocated``
    does, and no process is started: resident memory says nothing about a GPU's memory.

    Raises as ``resident_peak_bytes`` if ``runs`` is not 0, and ``InvalidInputError`` for a model on several devices.
    """
    (comparison,) = compare_peaks_with(torch_model, [mucudnn_model], sample_input, runs)
    return comparison


def compare_peaks_with(
    torch_model: nn.Module, mucudnn_models: Sequence[nn.Module], sample_input: Any, runs: int = 3
) -> list[PeakComparison]:
    """Compare several models with the same one of torch, as ``compare_peaks`` does with one."""
    models = torch_model, *mucudnn_models
    resident: list[list[int]] = [[] for _ in models]
    for _ in range(runs if has_resident_peak(torch_model) else 0):
        for peaks, model in zip(resident, models, strict=True):
            peaks.append(resident_peak_bytes(model, sample_input))
    (torchs_bytes, torchs_resident_bytes), *ours = (
        (_allocator_peak_bytes_of(model, sample_input), median_high(peaks) if peaks else None)
        for model, peaks in zip(models, resident, strict=True)
    )
    return [
        PeakComparison(torchs_bytes, allocator_bytes, torchs_resident_bytes, resident_bytes)
        for allocator_bytes, resident_bytes in ours
    ]


def has_resident_peak(model: nn.Module) -> bool:
    """Whether a step's memory is that of the process. Raises ``InvalidInputError`` for several devices."""
    return device_of(model).type == "cpu"


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


def resident_peak_bytes(model: nn.Module, sample_input: Any) -> int:
    """Largest resident memory of a fresh process that runs two training steps; loading the model is not counted.

    The process gives every freed block of a MiB or more back to the system at once. By default glibc keeps up to 32 MiB
    of each kind, and fragments of them. Those differ by a fifth from run to run, in torch's own step too.

    Raises ``UnavailableError`` where this is not Linux, and for models that cannot be pickled.
    """
    if not _RESET.exists():
        raise UnavailableError("peak resident memory is read from /proc, which only Linux has: ask for 0 runs")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.pickle"
        path.write_bytes(_pickled(model, sample_input))  # handed over by multiprocessing, its memory would be shared
        with _environment(_GIVING_BACK), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            return fresh.submit(_resident_peak_bytes, path, torch.get_num_threads()).result()


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


def _pickled(model: nn.Module, sample_input: Any) -> bytes:
    try:
        return pickle.dumps((model, sample_input))
    except Exception as error:  # a class may raise anything when it is pickled
        reason = f"{type(error).__name__}: {error}"
        raise UnavailableError(
            "peak resident memory is that of a process of its own, for which the model cannot be pickled: ask for 0 "
            f"runs, or mend it ({reason})"
        ) from error


def _allocator_peak_bytes_of(model: nn.Module, sample_input: Any) -> int:
    device = device_of(model)
    with made_current(device), undisturbed(model):
        return allocator_peak_bytes(repeatable_step(model, sample_input), device.type)


def _resident_peak_bytes(path: Path, threads: int) -> int:
    torch.set_num_threads(threads)
    with path.open("rb") as file:
        model, sample_input = pickle.load(file)
    step = repeatable_step(model, sample_input)
    _RESET.write_text("5")  # the peak begins again at what is resident now
    step()
    step()
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 2**10


def repeatable_step(model: nn.Module, sample_input: Any) -> Callable[[], None]:
    """A training step without an optimizer that leaves the gradients ``None``; see ``training_step``."""
    arguments = sample_input if isinstance(sample_input, tuple) else (sample_input,)

    def step() -> None:
        training_step(model, arguments)
        model.zero_grad(set_to_none=True)

    return step
