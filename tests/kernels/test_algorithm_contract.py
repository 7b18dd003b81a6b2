"""The contract of all algorithms (``mucudnn.kernels.algorithm``): a new one needs no new test here."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support import compiled
from torch import Tensor, nn

import mucudnn
from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.algorithm import Workspace
from mucudnn.kernels.registry import algorithm, algorithms
from mucudnn.kernels.torch_convolution import reference
from mucudnn.kernels.torch_ops import gemm
from mucudnn.kernels.torch_ops.native import NATIVE_ALGORITHM, NATIVE_OTHER_FORMAT
from mucudnn.running.choices import Choices
from mucudnn.testing import check_algorithm
from mucudnn.testing.checks import IMAGE, Call, dependent, torchs_spoilt_result
from mucudnn.testing.contract import GEOMETRIES, geometry

NAMES = [a.name for a in algorithms()]
LOOSER = {"winograd-6x6": 10.0}  # interpolation points up to 2 cost a digit; the default error bound bars it


@pytest.mark.usefixtures("in_one_format")
@pytest.mark.parametrize("name", NAMES)
def test_every_promise_is_kept(name: str) -> None:
    of_images = name.removeprefix("frames-").removeprefix("rows-")
    if of_images in ("depthwise", "implicit-gemm", "pointwise") or of_images.startswith("winograd"):
        compiled.algorithm(of_images)  # or this build has none
    bounds = {dtype: LOOSER.get(of_images, 1.0) * bound for dtype, bound in DEFAULT_MAX_RELATIVE_ERROR.items()}
    strided = [ConvProblem(operation, 4, 13, 11, 3, 5, 5, (2, 2), (2, 2)) for operation in Operation]
    passed = check_algorithm(algorithm(name), problems=strided, max_relative_error=bounds, random_problems=3)
    assert passed >= 10  # test_fuzz_problems has more random ones


@pytest.mark.parametrize("operation", [Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER])
def test_native_refuses_a_slice_for_which_torch_changes_the_backend(operation: Operation) -> None:
    native = algorithm("native")
    small = ConvProblem(operation, 16, 8, 8, 16, 3, 3, padding=(1, 1))
    large = ConvProblem(operation, 64, 28, 28, 64, 3, 3, padding=(1, 1))
    assert "Slow2d instead of Mkldnn" in str(native.supports_micro_batch(small, 1))
    assert native.supports_micro_batch(small, 2) is None
    assert native.supports_micro_batch(large, 1) is None
    assert native.supports_micro_batch(small.with_operation(Operation.FORWARD), 1) is None


@pytest.mark.parametrize("memory_format", MemoryFormat)
def test_native_declares_the_bytes_of_any_call_not_those_of_a_first_one(memory_format: MemoryFormat) -> None:
    """What is found out once in a process must not be counted, nor be missing."""
    problem = ConvProblem(Operation.FORWARD, 19, 23, 11, 32, 3, 3, memory_format=memory_format)  # only in this test
    handed, internal = algorithm("native").workspace(problem, 2), algorithm("native").internal_bytes(problem, 2)
    for _ in range(2):
        call = Call(problem, 2)
        call.run(algorithm("native"), [2], torch.randn(problem.k))
        assert call.undeclared_bytes == 0
    assert handed == Workspace()
    assert internal < 3 * call.y.nbytes + call.x.nbytes + 2 * call.w.nbytes


def test_unknown_names_say_what_there_is() -> None:
    assert NAMES[0] == "native"
    assert len(set(NAMES)) == len(NAMES)
    with pytest.raises(InvalidInputError, match=r"algorithm is 'magic'; allowed are native, .*gemm"):
        algorithm("magic")
    with pytest.raises(UnavailableError, match=r"'abacus'; there are algorithms for: cpu"):
        algorithms("abacus")


# Torch's own convolution where oneDNN would end the process: never by our doing.


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


# How far NaN and infinities spread: at least as far as the definition says, and no further where that is promised.


EVERY = [a.name for a in algorithms()]


@pytest.mark.parametrize("beyond", ["rows", "columns"])
def test_gemm_is_local_in_half_precision_where_torchs_product_is(monkeypatch: pytest.MonkeyPatch, beyond: str) -> None:
    """Here that of bfloat16 gives each row, or column, what the next one has of zeros times NaN; others do not."""

    def multiply(operation: Operation, x: Tensor, w: Tensor, y: Tensor) -> None:
        left, right, out = gemm._factors(operation, x, w, y)
        exact = left.double() @ right.double()
        if x.dtype is torch.bfloat16:
            exact += 0 * exact.roll(-1, 1 if beyond == "rows" else 2)
        out.copy_(exact)

    monkeypatch.setattr(gemm, "multiply", multiply)
    gemm._product_is_local.cache_clear()
    dtypes = ("float32", "float16", "bfloat16")
    assert [gemm.GEMM.is_local(forward(3, 8, dtype)) for dtype in dtypes] == [True, True, False]
    gemm._product_is_local.cache_clear()


def test_torchs_own_spoils_what_the_definition_says() -> None:
    """In float32; of dw what zeros of the padding explain too, since some of its backends multiply them by NaN."""
    for operation, key, memory_format in product(Operation, GEOMETRIES, MemoryFormat):
        problem, _, _ = geometry(key, operation, memory_format=memory_format)
        image = IMAGE[operation]
        assert torch.equal(~torchs_spoilt_result(problem, image).isfinite(), dependent(problem, image)), problem
        if operation is Operation.BACKWARD_FILTER:
            allowed = dependent(problem, "y", on_padding=True)
            assert not (~torchs_spoilt_result(problem, "y").isfinite() & ~allowed).any(), problem


# Loss scaling


def scaled_cases() -> list[Any]:
    """(name, filter size, image size, dtype): the smallest that the algorithm computes, in each dtype of training."""
    parameters = []
    for name, dtype in product(EVERY, ("float32", "float16", "bfloat16")):
        sizes = [(3, 8), (5, 8), (3, 40)]
        problems = {size: forward(*size, dtype) for size in sizes}
        fitting = [size for size, problem in problems.items() if algorithm(name).supports(problem) is None]
        parameters += [pytest.param(name, *size, dtype, id=f"{name}-{dtype}") for size in fitting[:1]]
    return parameters


def forward(r: int, height: int, dtype: str) -> ConvProblem:
    return ConvProblem(Operation.FORWARD, 4, height, height, 4, r, r, padding=(r // 2, r // 2), dtype=dtype)


def tuned_layer(name: str, problem: ConvProblem) -> mucudnn.Conv2d:
    """On four samples, in every operation, it runs this algorithm; without a bias, whose gradient is torch's."""
    layer = mucudnn.Conv2d(problem.c, problem.k, problem.r, padding=problem.padding, bias=False)
    configuration = Configuration((MicroConfig(name, 4),), time_s=1.0, workspace_bytes=0)
    layer.choices = Choices.of({problem.with_operation(operation): {4: configuration} for operation in Operation})
    return layer


@pytest.mark.parametrize(("name", "r", "height", "dtype"), scaled_cases())
def test_loss_scaling_finds_the_overflow_and_skips_the_step(name: str, r: int, height: int, dtype: str) -> None:
    """As with torch: the layer's own weight through dw, and that of the layer before through dx."""
    torch.manual_seed(0)
    problem, half = forward(r, height, dtype), dtype != "float32"
    before, layer = nn.Conv2d(3, 4, 1), tuned_layer(name, problem)
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in (before, layer)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-60)
    x, weights = torch.randn(4, 3, height, height), torch.full((4, 4, height, height), 2.0**-20)
    weights[1, 2, 3, 3] = 8.0  # one element of the gradient overflows, the others do not
    initial = [module.weight.detach().clone() for module in (before, layer)]

    def step() -> None:
        with torch.autocast("cpu", getattr(torch, dtype if half else "bfloat16"), enabled=half):
            y = layer(before(x))
        scaler.scale((y.float() * weights).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

    step()
    assert all(module.weight.equal(w) for module, w in zip((before, layer), initial, strict=True))
    assert scaler.get_scale() == 2.0**66
    for _ in range(2):  # in float16 the first of them overflows still
        step()
    assert scaler.get_scale() == (2.0**6 if dtype == "float16" else 2.0**66)
    for module, w in zip((before, layer), initial, strict=True):
        assert module.weight.isfinite().all()
        assert not module.weight.equal(w)
    assert layer.choices is not None
    ran = {executable.problem.operation for executable in layer.choices.executables.values() if executable is not None}
    assert ran == (set() if name == "native" else set(Operation))
