"""Errors of candidates (algorithms being measured): which types are caught, and how an error is stored."""

from __future__ import annotations

import torch

from mucudnn.words.errors import LibraryError

# Torch reports a lack of memory, on the CPU as on a GPU, as a RuntimeError.
CANDIDATE_ERRORS = (RuntimeError, MemoryError, LibraryError)


class UnsoundError(RuntimeError):
    """A candidate ran, but wrote outside its buffers, or a result that is not the convolution's."""


def without_frames(error: Exception) -> Exception:
    """Return the error without its traceback, whose frames would keep every tensor in them alive."""
    return error.with_traceback(None)


def give_back_cache() -> None:
    """Free GPU memory that torch's allocator caches for itself, since a library may have failed for lack of it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
