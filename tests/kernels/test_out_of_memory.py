"""What passes, and what comes back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mucudnn.core.errors import UnsoundError, without_frames
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.kernels.memory import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("needs 2 GiB; 1 GiB of memory are available"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        CudnnError("execute", 4004, "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", ""),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("FIND was unable to find an engine to execute this computation"),
    ],
)
def test_lack_of_memory_passes(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_torch_on_the_cpu_says_so_too() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        CudnnError("execute", 5000, "CUDNN_STATUS_EXECUTION_FAILED", ""),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        UnsoundError("the result is not finite"),
    ],
)
def test_other_faults_come_back(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_an_error_that_is_kept_keeps_no_tensors_alive() -> None:
    def fail() -> None:
        tensor = torch.empty(1)
        alive.append(weakref.ref(tensor))
        raise MemoryError

    alive: list[weakref.ref[torch.Tensor]] = []
    gc.disable()
    try:
        try:
            fail()
        except MemoryError as error:
            kept = without_frames(error)
        assert alive[0]() is None
        assert isinstance(kept, MemoryError)
    finally:
        gc.enable()
