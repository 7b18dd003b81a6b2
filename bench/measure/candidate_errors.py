"""Errors of candidates while they are measured: what is caught, kept and shown of them."""

from __future__ import annotations

import torch

from mucudnn.words.errors import LibraryError

# Torch reports a lack of memory, on the CPU as on a GPU, as a RuntimeError.
CANDIDATE_ERRORS = (RuntimeError, MemoryError, LibraryError)


class UnsoundError(RuntimeError):
    """A candidate that ran, but wrote outside its buffers, or something else than the convolution."""


def without_frames(error: Exception) -> Exception:
    """The error, to be kept. The frames of its traceback would keep every tensor in them, and themselves, alive."""
    return error.with_traceback(None)


def first_line(error: Exception) -> str:
    """What happened; torch appends stack traces."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def give_back_cache() -> None:
    """Give back what torch's allocator keeps for itself on a GPU: a library may have lacked it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
