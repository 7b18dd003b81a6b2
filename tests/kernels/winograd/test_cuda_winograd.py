"""Winograd's CUDA functions, run on the CPU as plain C++: what they compute, and in what memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda.emulator import COMPILER, EmulatedLauncher
from support.half_precision import assert_half_is_float32_rounded_once
from support.problems.winograd_backend import WithoutCublas, awkward_geometries
from torch import Tensor

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, Pair
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.kernels.winograd.cuda import CudaWinograd, cook_toom, winograd_source
from mucudnn.kernels.winograd.cupy_launcher import LaunchError
from mucudnn.measuring import guard_zones
from mucudnn.testing.checks import Call

ALGORITHMS = [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5)]
by_algorithm = pytest.mark.parametrize(("m", "r"), ALGORITHMS)
by_operation = pytest.mark.parametrize("operation", list(Operation))
by_format = pytest.mark.parametrize("memory_format", list(MemoryFormat))
compiled = pytest.mark.skipif(COMPILER is None, reason="there is no g++ to run CUDA C++ on the CPU with")


@pytest.fixture
def launcher() -> EmulatedLauncher:
    return EmulatedLauncher()


@pytest.fixture(autouse=True)
def nan_around_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whatever is read outside of an operand shows, too."""
    monkeypatch.setattr(guard_zones, "_PATTERN", 0xFF)


def problem_for(operation: Operation, size: Pair, r: int, **changes: object) -> ConvProblem:
    arguments = {"c": 3, "k": 4, "dtype": "float64"} | changes
    return ConvProblem(operation, h=size[0], w=size[1], r=r, s=r, **arguments)  # type: ignore[arg-type]


def check(
    launcher: EmulatedLauncher,
    m: int,
    problem: ConvProblem,
    micro_batches: tuple[int, ...] = (1,),
    bias: Tensor | None = None,
) -> Tensor:
    """The result, which is the convolution in the declared bytes."""
    call = Call(problem, sum(micro_batches))
    expected = reference(problem, call.x, call.w, call.y, bias)
    actual = call.run(WithoutCublas(m, problem.r, launcher=launcher), micro_batches, bias)
    assert relative_l2_error(actual, expected) < (1e-12 if m == 6 else 1e-13)
    assert call.undeclared_bytes <= 0
    return actual


@compiled
@by_algorithm
@by_operation
@by_format
def test_every_awkward_geometry(
    launcher: EmulatedLauncher, m: int, r: int, operation: Operation, memory_format: MemoryFormat
) -> None:
    for geometry in awkward_geometries(m, r):
        check(launcher, m, ConvProblem(operation, **geometry, dtype="float64", memory_format=memory_format), (3, 1))
    changes = {"c": 33, "k": 20, "padding": (r // 2, r // 2), "memory_format": memory_format}
    check(launcher, m, problem_for(operation, (12, 13), r, **changes), (2, 1))


@compiled
@by_operation
@by_format
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_float32_rounded_once(
    launcher: EmulatedLauncher, operation: Operation, memory_format: MemoryFormat, dtype: str
) -> None:
    arguments = {"c": 8, "k": 8, "padding": (1, 1), "memory_format": memory_format, "dtype": dtype}
    algorithm = WithoutCublas(4, 3, launcher=launcher)
    assert_half_is_float32_rounded_once(algorithm, problem_for(operation, (9, 9), 3, **arguments), [1, 1])


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_is_rounded_to_half_precision_as_torch_does(launcher: EmulatedLauncher, dtype: torch.dtype) -> None:
    """Infinities, halfway cases, and NaNs among them: 0x7fffffff is what arithmetic makes on GPUs."""
    bits = torch.randint(-(2**31), 2**31, (50_000,), dtype=torch.int32)
    bits[:6] = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, 0x3F808000, 0x3F818000, -(2**31)], dtype=torch.int32)
    wide = bits.view(torch.float32)
    narrow = torch.zeros(len(wide), dtype=dtype)
    source = winograd_source(cook_toom(2, 3), str(dtype).removeprefix("torch."), MemoryFormat.CONTIGUOUS, 128) + (
        "FUNCTION round_all(const float* from, T* to, Filters all) {"
        "  if (thread_number() < all.count) narrow(from[thread_number()], to[thread_number()]);"
        "}"
    )
    pointers = (wide.data_ptr(), narrow.data_ptr())
    launcher.launch(source, "round_all", 400, 128, pointers, (len(wide), 1), torch.device("cpu"))
    torch.testing.assert_close(narrow, wide.to(dtype), rtol=0, atol=0, equal_nan=True)


@compiled
@pytest.mark.parametrize(
    ("memory_format", "image_size", "lit"),
    [
        (MemoryFormat.CONTIGUOUS, (3, 1, 2**30), (2, 0)),  # the last channel
        (MemoryFormat.CHANNELS_LAST, (2, 2, 2**30), (0, 1)),  # the first pixel of the second row
    ],
)
def test_offsets_within_a_tensor_may_exceed_32_bits(
    launcher: EmulatedLauncher, memory_format: MemoryFormat, image_size: tuple[int, int, int], lit: Pair
) -> None:
    """A pixel 2^31 elements into a float16 image, seen by the first tile; few pages of the gigabytes are touched."""
    channels, height, width = image_size
    channel, row = lit
    image = torch.from_numpy(np.zeros(channels * height * width, np.float16))
    image[2**31] = 1.0
    planes = torch.full((4, 4, channels), torch.nan)
    source = winograd_source(cook_toom(2, 3), "float16", memory_format, 128)
    sizes = (channels, channels, 1, 1, 1, height, width, 1, 1)
    pointers = (image.data_ptr(), planes.data_ptr())
    launcher.launch(source, "transform_source", 1, 128, pointers, sizes, torch.device("cpu"))
    tile = torch.zeros(4, 4)
    tile[1 + row, 1] = 1.0
    b_t = torch.tensor([[float(entry) for entry in line] for line in cook_toom(2, 3).b_t])
    expected = torch.zeros(4, 4, channels)
    expected[..., channel] = b_t @ tile @ b_t.T
    assert torch.equal(planes, expected)


def test_more_tiles_than_32_bits_count_are_refused() -> None:
    problem = ConvProblem(Operation.FORWARD, 2**16, 2, 2, 1, 3, 3, padding=(1, 1))
    x, y = (torch.empty(shape, device="meta") for shape in (problem.x_shape(2**15), problem.y_shape(2**15)))
    algorithm = CudaWinograd(2, 3)
    workspace = algorithm.workspace(problem, 2**15)
    prepared, scratch = (
        torch.empty(size, dtype=torch.uint8, device="meta")
        for size in (workspace.prepared_bytes, workspace.scratch_bytes)
    )
    with pytest.raises(LaunchError, match=r"2147483648 elements.*use a smaller micro-batch"):
        algorithm.step(problem, x, x, y, None, prepared, scratch)
