"""Errors of candidates (algorithms being measured): the types that are caught, and how they are kept."""

from __future__ import annotations

import torch

from mucudnn.core.errors import LibraryError

# Torch reports out-of-memory as a RuntimeError, on the CPU and on a GPU.
CANDIDATE_ERRORS = (RuntimeError, MemoryError, LibraryError)


class UnsoundError(RuntimeError):
    """Error of a candidate that wrote outside its buffers or computed a wrong result."""


def without_frames(error: Exception) -> Exception:
    """Return the error without its traceback, whose frames would keep every tensor in them alive."""
    return error.with_traceback(None)


def give_back_cache() -> None:
    """Free the GPU memory that torch's allocator caches, since a library may have failed for lack of memory."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
