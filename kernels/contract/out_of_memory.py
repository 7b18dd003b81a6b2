"""Tells a lack of memory, which passes, from other errors.

Torch reports it on the CPU as a plain ``RuntimeError``, and so do some of the libraries that it calls: by their words.
"""

from __future__ import annotations

import torch

from mucudnn.words.errors import LibraryError

_WORDS = (  # of torch's allocator on the CPU, C++, MKL, the CUDA runtime and its libraries
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "oneMKL DFTI ERROR: Not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    # Torch tries cuDNN's engines in turn and drops what each raises, for lack of memory, too: this is the last word
    "was unable to find an engine to execute this computation",
)


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether the same computation may succeed another time, when there is more memory."""
    if isinstance(error, LibraryError):
        return error.is_lack_of_memory
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in str(error) for words in _WORDS)
