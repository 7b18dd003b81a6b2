"""Gives each contestant a thread of its own, since libraries keep by thread what they found out.

Torch keeps the plan of every convolution that a thread has run on a GPU, and looks there first, whether it is told to
search or not. In one thread, the first contestant to run would decide for all. See ``run_single_conv`` and the
``thread_local benchmark_cache`` in torch's Conv_v8.cpp. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Self, TypeVar

import torch

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class OwnThread:
    """Thread in which calls run, backward passes too. A context manager: the thread ends with it."""

    def __init__(self, device: str = "cpu") -> None:
        """device: ``cpu`` or ``cuda``, whose current device and stream become those of the thread."""
        stream = torch.cuda.current_stream() if device == "cuda" else None
        self._executor = ThreadPoolExecutor(1, initializer=_prepare, initargs=(stream,))

    def call(self, function: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        """Call the function in that thread. Returns what it returns, raises what it raises."""
        return self._executor.submit(function, *args, **kwargs).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()


def _prepare(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        torch.cuda.set_stream(stream)  # and the device of the stream
    torch.autograd.set_multithreading_enabled(False)  # otherwise backward passes run in a thread that all share
