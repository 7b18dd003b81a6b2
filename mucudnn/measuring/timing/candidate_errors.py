"""Errors of candidates while they are measured: which are caught, and how they are kept."""

from __future__ import annotations

import torch

from mucudnn.words.errors import LibraryError

# Torch reports a lack of memory, on the CPU as on a GPU, as a RuntimeError.
CANDIDATE_ERRORS = (RuntimeError, MemoryError, LibraryError)


class UnsoundError(RuntimeError):
    """A candidate ran, but wrote outside its buffers, or wrote something else than the convolution."""


def without_frames(error: Exception) -> Exception:
    """Return the error without its traceback, whose frames would keep every tensor in them alive."""
    return error.with_traceback(None)


def give_back_cache() -> None:
    """Give back what torch's allocator keeps for itself on a GPU: a library may have lacked it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
