"""What a candidate's error means: a lack of memory, which passes, or a fault of its own, which comes back."""

from __future__ import annotations

import torch

from mucudnn.kernels.cudnn.library import CudnnError

# Torch reports a lack of memory, on the CPU as on a GPU, as a RuntimeError.
CANDIDATE_ERRORS = (RuntimeError, MemoryError, CudnnError)

_NO_MEMORY = (  # in messages of plain RuntimeErrors: torch's allocator on the CPU, the CUDA runtime and its libraries
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    # Torch tries cuDNN's engines in turn and drops what each raises, for lack of memory, too: this is the last word
    "was unable to find an engine to execute this computation",
)


class UnsoundError(RuntimeError):
    """A candidate that ran, but wrote outside its buffers, or something else than the convolution."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether the same candidate may run another time, when there is more memory."""
    if isinstance(error, CudnnError):
        return error.is_lack_of_memory
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in str(error) for words in _NO_MEMORY)


def without_frames(error: Exception) -> Exception:
    """The error, to be kept. The frames of its traceback would keep every tensor in them, and themselves, alive."""
    return error.with_traceback(None)


def first_line(error: Exception) -> str:
    """What happened; torch appends stack traces."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def give_back_cache() -> None:
    """What torch's allocator keeps for itself on a GPU may be what cuDNN or CUDA lacked."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
