"""Torch's own convolution on CUDA devices, with the user's settings and with torch's search among cuDNN's engines.

With ``torch.backends.cudnn.benchmark``, torch times the engines that cuDNN proposes at the first use of a size
(``benchmark_limit`` engines; 0 for all), and keeps the fastest. Torch caches its choice per thread, with or without a
search, and does not repeat it when the setting changes. Each limit therefore has its own thread here, so that its
choices do not affect the user's own convolutions.
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

_changing_settings = threading.Lock()  # The settings are global, so threads must not restore each other's values.


@dataclass(frozen=True, slots=True)
class NativeBenchmark(Native):
    """Torch's own convolution of a whole mini-batch, with cuDNN's ``benchmark = True`` and this ``benchmark_limit``.

    It is both a baseline and a candidate. A call waits for the thread in which torch searches with this limit, which
    costs the calling thread some microseconds.
    """

    device_type: str = "cuda"
    limit: int = 10

    @property
    def is_search(self) -> bool:
        return True

    def supports(self, problem: ConvProblem) -> str | None:
        if torch.backends.cudnn.enabled:
            return None
        return "torch.backends.cudnn.enabled is False, so torch does not use cuDNN and has no engines to search"

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        return "torch's own search is a baseline that runs undivided; slices run on cuDNN's engines directly"

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


BENCHMARKS = tuple(  # torch's default limit, and no limit
    NativeBenchmark(f"{TORCHS_OWN}-benchmark-{limit}", limit=limit) for limit in (10, 0)
)


@contextmanager
def cudnn_benchmark(limit: int) -> Iterator[None]:
    """Set cuDNN's ``benchmark = True`` and this ``benchmark_limit`` in the context; restore both, even after errors.

    ``torch.backends.cudnn.flags`` would also set all other settings, and reading the settings of TF32 can raise.
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
    """Run a function on the caller's CUDA stream, in the thread that is reserved for this ``benchmark_limit``.

    A thread inherits neither stream nor gradient mode. The function runs in inference mode, in which it may write to
    any tensor.
    """
    with torch.inference_mode(), nullcontext() if stream is None else torch.cuda.stream(stream):
        if stream is not None and torch.cuda.is_current_stream_capturing():
            function()  # A search cannot be captured; torch uses an earlier choice or its default.
        else:
            with cudnn_benchmark(limit):
                function()
