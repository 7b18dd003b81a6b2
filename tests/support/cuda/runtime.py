"""What torch shows of a CUDA device, without one: streams, events, graphs, properties and counters.

Events are read from a clock that does not depend on what else the machine does. What is captured is run while it is,
and again when it is replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from support.cuda.tensors import CAPTURED, CAPTURING, CLOCK, GPU, MEMORY

NAME = "NVIDIA Pretended"
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=9,
    minor=0,
    total_memory=2**30,
    L2_cache_size=2**16,
    multi_processor_count=132,
    uuid="00000000-0000-0000-0000-000000000000",
)


class Stream:
    """``cuda_stream``: 0 is the default one."""

    _made = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        Stream._made += 1
        self.cuda_stream, self.device = 64 * Stream._made, GPU

    def synchronize(self) -> None:
        _synchronize()

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._enable_timing = enable_timing
        self._at_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._at_s = CLOCK.now_s()

    def synchronize(self) -> None:
        _synchronize()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self._enable_timing
        assert end._enable_timing
        assert self._at_s is not None
        assert end._at_s is not None
        return 1000 * (end._at_s - self._at_s)


class Graph:
    _captured: Sequence[Callable[[], None]] = ()

    def capture_begin(self, *_: Any, **__: Any) -> None:
        assert not CAPTURING.is_set()
        CAPTURED.clear()
        CAPTURING.set()

    def capture_end(self) -> None:
        CAPTURING.clear()
        self._captured = [*CAPTURED]

    def replay(self) -> None:
        for run_again in self._captured:
            run_again()


def captured_too(function: Callable[..., None]) -> Callable[..., None]:
    """What is no operator of torch."""

    def run(*arguments: Any) -> None:
        function(*arguments)
        if CAPTURING.is_set():
            CAPTURED.append(partial(function, *arguments))

    return run


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Generator:
        made: Generator = super().__new__(cls, "cpu")
        return made


@dataclass
class OfThread(threading.local):
    stream: Stream | None = None


@dataclass
class Streams:
    """Which one is current, in each thread."""

    default: Stream = field(default_factory=Stream)
    of_thread: OfThread = field(default_factory=OfThread)

    def __post_init__(self) -> None:
        self.default.cuda_stream = 0

    def current_stream(self, device: Any = None) -> Stream:
        return self.of_thread.stream or self.default

    def set_stream(self, stream: Stream) -> None:
        self.of_thread.stream = stream

    def stream(self, stream: Stream | None) -> StreamContext:
        return StreamContext(self, stream)


class StreamContext:
    """It may be entered again."""

    def __init__(self, streams: Streams, stream: Stream | None) -> None:
        self._streams, self._stream = streams, stream

    def __enter__(self) -> None:
        self._before = self._streams.of_thread.stream
        self._streams.of_thread.stream = self._stream or self._before

    def __exit__(self, *_: object) -> None:
        self._streams.of_thread.stream = self._before


def torch_cuda(streams: Streams) -> dict[str, Any]:
    """By the name in ``torch.cuda``."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _require_known,
        "device": _device,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_arch_list": lambda: ["sm_80", "sm_90", "compute_120"],
        "mem_get_info": lambda device=None: (2**29, 2**30),
        "default_generators": (Generator("cuda"),),
        "synchronize": _synchronize,
        "_sleep": _sleep,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: MEMORY.reset_peaks(),
        "memory_allocated": lambda device=None: MEMORY.blocks,
        "max_memory_allocated": lambda device=None: MEMORY.peak_blocks,
        "memory_stats": _memory_stats,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "current_stream": streams.current_stream,
        "default_stream": lambda device=None: streams.default,
        "set_stream": streams.set_stream,
        "stream": streams.stream,
        "is_current_stream_capturing": CAPTURING.is_set,
    }


@contextmanager
def _device(device: Any) -> Iterator[None]:
    _require_known(device)
    yield


def _require_known(device: Any) -> None:
    assert device in (0, GPU, torch.device("cuda"), "cuda", "cuda:0", None), device


def _synchronize(device: Any = None) -> None:
    if CAPTURING.is_set():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def _sleep(cycles: int) -> None:
    assert isinstance(cycles, int)
    assert cycles >= 0


def _memory_stats(device: Any = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": MEMORY.blocks,
        "allocated_bytes.all.peak": MEMORY.peak_blocks,
        "requested_bytes.all.current": MEMORY.requested,
        "requested_bytes.all.peak": MEMORY.peak_requested,
    }
