"""Recognizes out-of-memory errors, which can be retried, and frees memory for that.

On the CPU, torch and some libraries raise a plain ``RuntimeError`` when out of memory, so the message decides.
"""

from __future__ import annotations

import torch

from mucudnn.core.errors import LibraryError

_WORDS = (  # Substrings of the messages of torch's CPU allocator, C++, MKL, the CUDA runtime and its libraries.
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "oneMKL DFTI ERROR: Not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    # Torch tries cuDNN's engines one after another and swallows their errors; it raises this if all have failed.
    "was unable to find an engine to execute this computation",
)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means a lack of memory, so that a retry with more free memory may succeed."""
    if isinstance(error, LibraryError):
        return error.is_lack_of_memory
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in str(error) for words in _WORDS)


def give_back_cache() -> None:
    """Free the GPU memory that torch's allocator caches, since a library may have failed for lack of memory."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
