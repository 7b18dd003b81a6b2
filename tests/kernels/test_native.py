"""Torch's own convolution where oneDNN would end the process: never by our doing."""

from __future__ import annotations

from dataclasses import replace

import torch

from mucudnn.kernels.contract.reference import reference
from mucudnn.kernels.registry import algorithm
from mucudnn.kernels.torch_ops.native import NATIVE_ALGORITHM, NATIVE_OTHER_FORMAT
from mucudnn.testing.guarded_call import Call
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

# channels-last and with a bias oneDNN 3.12 crashes; torch computes one sample of it with im2col
CRASHING = ConvProblem(
    Operation.FORWARD, 16, 13, 1, 13, 3, 3, (2, 2), (3, 9), (1, 2), memory_format=MemoryFormat.CHANNELS_LAST
)


def test_one_sample_is_computed_by_what_torch_picks_for_it() -> None:
    call, bias = Call(CRASHING, 1), torch.randn(CRASHING.k)
    y = call.run(NATIVE_ALGORITHM, [1], bias)
    torch.testing.assert_close(y.double(), reference(CRASHING, call.x, call.w, call.y, bias), rtol=1e-5, atol=1e-5)


def test_it_is_neither_cut_into_such_samples_nor_converted_into_that_format() -> None:
    contiguous = replace(CRASHING, memory_format=MemoryFormat.CONTIGUOUS)
    assert "cannot be called by name" in (NATIVE_ALGORITHM.supports_micro_batch(CRASHING, 1) or "")
    assert "oneDNN may crash on it" in (NATIVE_OTHER_FORMAT.supports(contiguous) or "")


def test_less_padding_bars_neither() -> None:
    usual = replace(CRASHING, padding=(2, 4))
    assert NATIVE_ALGORITHM.supports_micro_batch(usual, 1) is None
    assert NATIVE_OTHER_FORMAT.supports(usual) is None


def test_compiled_algorithms_say_which_dilations_they_count() -> None:
    far = ConvProblem(Operation.FORWARD, 4, 3, 3, 4, 1, 1, dilation=2**31 - 1)
    assert (
        algorithm("implicit-gemm").supports(far)
        == "a size is 2147483647; the compiled algorithms take up to 1073741824"
    )
