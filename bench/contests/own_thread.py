"""A thread of its own for each rival, where libraries keep by thread what they found out.

Torch keeps the plan of every convolution that a thread has run on a GPU, and looks there first, whether it is told to
search or not: in one thread, the first to run decides for all. (``run_single_conv`` and the ``thread_local
benchmark_cache`` of torch's Conv_v8.cpp; not run on a GPU yet.)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Self, TypeVar

import torch

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class OwnThread:
    """Calls run in one thread, backward passes too. A context manager: the thread ends with it."""

    def __init__(self, device: str = "cpu") -> None:
        """device: ``cpu`` or ``cuda``, whose current device and stream are then those of the thread, too."""
        stream = torch.cuda.current_stream() if device == "cuda" else None
        self._executor = ThreadPoolExecutor(1, initializer=_prepare, initargs=(stream,))

    def call(self, function: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        """What the function returns or raises, in that thread."""
        return self._executor.submit(function, *args, **kwargs).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()


def _prepare(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        torch.cuda.set_stream(stream)  # and its device
    torch.autograd.set_multithreading_enabled(False)  # else backward passes run in a thread that all share
