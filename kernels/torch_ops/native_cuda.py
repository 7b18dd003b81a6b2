"""Torch's own convolution on CUDA devices: as the user has it, and as it is with cuDNN's own search.

With ``torch.backends.cudnn.benchmark`` torch times the engines that cuDNN proposes when a size first comes
(``benchmark_limit`` of them, 0: all), and keeps the fastest. What it chose for a size, with or without a search, it
keeps for the thread in which it chose, and does not choose again when the setting changes. So each limit has a thread
of its own here, and what is found there is not what the user's own convolutions run. Nothing of this has been run on a
GPU yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from mucudnn.kernels.torch_ops.native import NATIVE_OTHER_FORMAT, Native
from mucudnn.words.problem import ConvProblem
from mucudnn.words.torch_settings import TORCHS_OWN

NATIVE_ON_CUDA = Native(TORCHS_OWN, device_type="cuda")
NATIVE_OTHER_FORMAT_ON_CUDA = Native(NATIVE_OTHER_FORMAT.name, other_format=True, device_type="cuda")

_changing_settings = threading.Lock()  # they are the process's, so two threads would restore each other's


@dataclass(frozen=True, slots=True)
class NativeBenchmark(Native):
    """Torch's own with ``benchmark = True`` and this ``benchmark_limit``, undivided: a baseline, and a candidate.

    A call is handed to the limit's thread and waited for, which costs some microseconds of the calling thread.
    """

    device_type: str = "cuda"
    limit: int = 10

    @property
    def is_search(self) -> bool:
        return True

    def supports(self, problem: ConvProblem) -> str | None:
        if torch.backends.cudnn.enabled:
            return None
        return "torch.backends.cudnn.enabled is False, so that torch does not use cuDNN and there is nothing to search"

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        return "torch's own search is a baseline, run undivided; slices run on the engines that it would find"

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        operands = (x, w, y, bias, prepared, scratch)
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
        call = partial(_on_stream, stream, self.limit, partial(NATIVE_ON_CUDA.step, problem, *operands))
        _thread_of(self.limit).submit(call).result()


BENCHMARKS = tuple(  # torch's default limit, and none
    NativeBenchmark(f"{TORCHS_OWN}-benchmark-{limit}", limit=limit) for limit in (10, 0)
)


@contextmanager
def cudnn_benchmark(limit: int) -> Iterator[None]:
    """Torch with ``benchmark = True`` and this ``benchmark_limit``; both are set back as they were, also on errors.

    Not ``torch.backends.cudnn.flags``: it sets all other settings too, and reading those of TF32 can raise.
    """
    cudnn = torch.backends.cudnn
    with _changing_settings:
        found = cudnn.benchmark, cudnn.benchmark_limit
        try:
            cudnn.benchmark, cudnn.benchmark_limit = True, limit
            yield
        finally:
            cudnn.benchmark, cudnn.benchmark_limit = found


@cache
def _thread_of(limit: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"mucudnn-benchmark-{limit}")


def _on_stream(stream: torch.cuda.Stream | None, limit: int, function: Callable[[], None]) -> None:
    """Runs in the limit's thread, which has none of the caller's state: neither its stream nor its gradient mode.

    In inference mode it may write to whatever tensors it is given.
    """
    with torch.inference_mode(), nullcontext() if stream is None else torch.cuda.stream(stream):
        if stream is not None and torch.cuda.is_current_stream_capturing():
            function()  # a search cannot be captured: this is what an earlier call found, or what torch has without
        else:
            with cudnn_benchmark(limit):
                function()
