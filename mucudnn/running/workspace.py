"""Memory for calls: the workspace that each thread keeps between calls, which saves page faults."""

from __future__ import annotations

import os
import threading
from math import inf
from weakref import WeakSet

import torch
from torch import Tensor

from mucudnn.core.errors import say_once
from mucudnn.kernels.pages import on_huge_pages


def workspace_of(size_bytes: int, device: torch.device, *, keeps: bool, most_bytes: float = inf) -> Tensor:
    """Return a workspace of at least ``size_bytes``, 1-D uint8, uninitialized, aligned to at least 64 bytes.

    keeps: whether, on the CPU, to use the workspace that this thread keeps between calls.
    most_bytes: limit on the kept workspace, which is freed first if it is larger than both this and ``size_bytes``.
    """
    if keeps and device.type == "cpu":
        if most_bytes != inf:
            make_room(max(size_bytes, most_bytes))
        return kept_by_each_thread.workspace.at_least(size_bytes)
    return on_huge_pages(torch.empty(size_bytes, dtype=torch.uint8, device=device))


class BorrowedWorkspace:
    """Context with a workspace as ``workspace_of`` returns it, which nobody else gets until the end of the block.

    Calls inside the block get other memory, which is freed at its end if it is smaller.
    """

    __slots__ = ("_buffer", "_kept")

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._buffer = workspace_of(size_bytes, device, keeps=True)
        self._kept = kept_by_each_thread.workspace if device.type == "cpu" else None

    def __enter__(self) -> Tensor:
        if self._kept is not None:
            self._kept.release()
        return self._buffer

    def __exit__(self, *_: object) -> None:
        kept = self._kept
        if kept is not None and (kept.buffer is None or kept.buffer.numel() < self._buffer.numel()):
            kept.buffer = self._buffer


def make_room(most_bytes: float) -> None:
    """Free this thread's kept workspace if it is larger than ``most_bytes``."""
    kept = kept_by_each_thread.workspace
    if kept.buffer is not None and kept.buffer.numel() > most_bytes:
        kept.release()


def lasting_buffer(size_bytes: int) -> Tensor:
    """Return a new CPU buffer, 1-D uint8, that training may write to even if it was made in inference mode."""
    with torch.inference_mode(False):
        return on_huge_pages(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))  # ignore the default device


# Memory kept for speed


def release_workspaces() -> None:
    """Free the CPU workspaces of all threads; the next call that needs one allocates it again."""
    with _listing:
        workspaces = list(_workspaces)
    for workspace in workspaces:
        workspace.release()


def note_lack_of_memory(text: str, device: torch.device) -> None:
    """Warn once that memory is short and torch's own convolution runs; on the CPU, release all kept workspaces.

    Torch's own convolution then has as much memory as without this package.
    """
    if device.type == "cpu":
        release_workspaces()
    say_once(text)


class _KeptWorkspace:
    """The workspace of one thread, kept between calls, since page faults of fresh memory are slow."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        with _listing:
            _workspaces.add(self)

    def at_least(self, size_bytes: int) -> Tensor:
        buffer = self.buffer
        if buffer is None or buffer.numel() < size_bytes:
            self.buffer = buffer = None  # freed first, so that there is never more than one
            buffer = self.buffer = lasting_buffer(size_bytes)
        return buffer

    def release(self) -> None:
        self.buffer = None


class _KeptByEachThread(threading.local):
    def __init__(self) -> None:
        self.workspace = _KeptWorkspace()


_workspaces: WeakSet[_KeptWorkspace] = WeakSet()
_listing = threading.Lock()  # new threads may register while another one releases


def _unlock_in_child() -> None:
    """Replace the lock in a forked process, which lacks the thread that may have held it."""
    global _listing
    _listing = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_child)
kept_by_each_thread = _KeptByEachThread()
