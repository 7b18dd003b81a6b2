"""The compiled algorithms refuse buffers that are too small and operands that do not belong together.

Before anything is written, in the optimised build, with an exception that says what there is and what is needed. Their
sizes never wrap.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from support.compiled import algorithm
from torch import Tensor

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.algorithm import Algorithm, Epilogue
from mucudnn.kernels.compiled.library import Stage, function, loaded_build
from mucudnn.kernels.memory import torch_dtype
from mucudnn.kernels.winograd.algorithms import Winograd

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
NAMES = ("winograd-2x2", "winograd-4x4", "winograd-6x6", "winograd-2x2-5x5", "winograd-4x4-5x5")
NAMES += ("winograd-4x4-stride2", "frames-winograd-4x4")
NAMES += ("implicit-gemm", "pointwise", "depthwise")
EVERY = (*NAMES, "loop-nest")  # which has no buffers
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
by_name = pytest.mark.parametrize("name", NAMES)
by_operation = pytest.mark.parametrize("operation", Operation)
BILLIONS = (10**9, 134_217_727, 134_217_728, 2**31 - 1, 2**31, 2**32 + 1, 2**40)  # tiles, units and tasks pass 32 bits


@pytest.fixture(autouse=True)
def two_threads() -> None:
    """With one, pointwise adds to dw alone, and needs no copies of it."""
    torch.set_num_threads(2)


def problem_for(name: str, operation: Operation, **changes: Any) -> ConvProblem:
    taps = 5 if "5x5" in name else 3
    sizes = {"c": 18, "h": 11, "w": 10, "k": 22, "r": taps, "s": taps, "padding": (1, 2)}
    if name.endswith("stride2"):
        sizes |= {"stride": (2, 2), "h": 12}  # a pixel more is an output more
    if name.startswith("frames-"):
        sizes |= {"d": 4, "t": 3, "padding": (1, 1, 2)}
    if name == "pointwise":
        sizes |= {"r": 1, "s": 1, "padding": (0, 0), "stride": (2, 1), "h": 12}
    sizes |= changes
    return ConvProblem(operation, **sizes)


def square(r: int, stride: int = 1, pixels: tuple[int, int] = (1, 1), c: int = 1, k: int = 1) -> ConvProblem:
    """A problem with an output of this many pixels."""
    h, w = ((size - 1) * stride + r for size in pixels)
    return ConvProblem(Operation.FORWARD, c, h, w, k, r, r, stride=(stride, stride))


@dataclass
class Operands:
    """Of one whole call: x, w, y, bias, and the buffers as declared, all full of ones."""

    problem: ConvProblem
    algorithm: Algorithm
    n: int = 2
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        workspace = self.algorithm.workspace(self.problem, self.n)
        self.tensors = {
            "x": torch.ones(self.problem.x_shape(self.n), dtype=torch_dtype(self.problem)),
            "w": torch.ones(self.problem.w_shape(), dtype=torch_dtype(self.problem)),
            "y": torch.ones(self.problem.y_shape(self.n), dtype=torch_dtype(self.problem)),
            "bias": torch.ones(self.problem.k, dtype=torch_dtype(self.problem)),
            "prepared": torch.ones(workspace.prepared_bytes, dtype=torch.uint8),
            "scratch": torch.ones(workspace.scratch_bytes, dtype=torch.uint8),
        }
        if self.problem.operation is not Operation.FORWARD:
            del self.tensors["bias"]

    def with_changed(self, name: str, change: Callable[[Tensor], Tensor]) -> Operands:
        """Return the same operands but for one."""
        other = copy.copy(self)
        other.tensors = {**self.tensors, name: change(self.tensors[name])}
        return other

    def run(self, part: str) -> None:
        t = self.tensors
        if part == "step":
            given = (t["x"], t["w"], t["y"], t.get("bias"), t["prepared"], t["scratch"])
            self.algorithm.step(self.problem, *given)
        else:
            getattr(self.algorithm, part)(self.problem, t["w"], t["prepared"])

    def assert_refused(self, part: str, message: str, *, writes_nothing: bool = True) -> None:
        before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        with pytest.raises(InvalidInputError, match=message):
            self.run(part)
        if writes_nothing:
            assert all(torch.equal(tensor, before[name]) for name, tensor in self.tensors.items())


def parts(operation: Operation) -> tuple[str, ...]:
    """In which compiled code writes."""
    return ("step", "close") if operation is Operation.BACKWARD_FILTER else ("open", "step")


@by_name
@by_operation
def test_a_buffer_that_is_one_byte_too_small_is_refused(name: str, operation: Operation) -> None:
    for dtype, buffer in product(("float32", "bfloat16"), ("prepared", "scratch")):
        for part in parts(operation) if buffer == "prepared" else ("step",):
            operands = Operands(problem_for(name, operation, dtype=dtype), algorithm(name))
            needed = operands.tensors[buffer].nbytes
            operands.run(part)  # as declared, it is enough
            operands.tensors[buffer] = operands.tensors[buffer][:-1].clone()
            operands.assert_refused(part, f"{buffer} holds {needed - 1} bytes; the call needs {needed}")


@by_name
@by_operation
def test_more_threads_than_the_scratch_was_declared_for_are_refused(name: str, operation: Operation) -> None:
    """The check counts what this call would write, not what was once declared."""
    torch.set_num_threads(1)
    operands = Operands(problem_for(name, operation, h=40, w=40), algorithm(name), n=8)
    torch.set_num_threads(3)
    if operation is Operation.BACKWARD_FILTER and name not in ("pointwise", "depthwise"):
        operands.run("step")  # whose scratch is shared
    else:
        operands.assert_refused("step", "(scratch|prepared) holds")


@pytest.mark.parametrize("name", EVERY)
@by_operation
def test_images_that_do_not_belong_together_are_refused(name: str, operation: Operation) -> None:
    changes: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda t: t[1:], "number of samples"),
        (lambda t: torch.cat([t, t[..., :1, :]], -2), "height of"),
        (lambda t: torch.cat([t, t[..., :1]], -1), "width of"),
        (lambda t: t.half(), "has dtype torch.float16; it must be that of the problem, float32"),
        (lambda t: t.double(), "has dtype torch.float64"),
        (lambda t: t[:1].expand(2, *t.shape[1:]), "strides"),
        (lambda t: t.to(memory_format=LAST[t.ndim]), "dense and contiguous"),
        (lambda t: torch.cat([t] * 64, 1), "prepared holds|number of (channels|filters)"),
        (lambda t: t[:0], "is 0; allowed is 1 to"),
        (lambda t: t[:, :, :0], "is 0; allowed is 1 to"),
    ]
    operands = Operands(problem_for(name, operation), algorithm(name))
    operands.tensors.pop("bias", None)
    for tensor, (change, message) in product(("x", "y"), changes):
        operands.with_changed(tensor, change).assert_refused("step", message)


@pytest.mark.parametrize("name", EVERY)
@by_operation
def test_a_filter_that_is_not_the_problem_s_is_refused(name: str, operation: Operation) -> None:
    changes: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda w: torch.cat([w, w], -2), "the height of the filter is"),
        (lambda w: torch.cat([w, w], -1), "the width of the filter is"),
        (lambda w: torch.cat([w] * 64), "prepared holds|number of (channels|filters)"),
        (lambda w: w.half(), "has dtype torch.float16; it must be that of the problem, float32"),
        (lambda w: w[:1].expand(22, *w.shape[1:]), "strides"),
    ]
    operands = Operands(problem_for(name, operation), algorithm(name))
    part = "close" if operation is Operation.BACKWARD_FILTER else "open"
    for change, message in changes:
        operands.with_changed("w", change).assert_refused("step" if name == "loop-nest" else part, message)


@by_operation
def test_a_filter_without_the_used_taps_of_a_volume_is_refused(operation: Operation) -> None:
    operands = Operands(problem_for("frames-winograd-4x4", operation), algorithm("frames-winograd-4x4"))
    operands.tensors["w"] = operands.tensors["w"][:, :, :-1].contiguous()
    part = "close" if operation is Operation.BACKWARD_FILTER else "open"
    operands.assert_refused(part, "the last tap is 3; allowed is 1 to 2")


@pytest.mark.parametrize("name", EVERY)
def test_a_bias_that_is_too_short_or_of_another_dtype_is_refused(name: str) -> None:
    operands = Operands(problem_for(name, Operation.FORWARD), algorithm(name))
    for bias, message in (
        (torch.ones(21), "the bias holds 84 bytes; the call needs 88"),
        (torch.ones(22, dtype=torch.float64), "the bias has dtype torch.float64; it must be that of the problem"),
    ):
        operands.tensors["bias"] = bias
        operands.assert_refused("step", message)


def stage_of(problem: ConvProblem, n: int, tile: int = 0, **changes: Any) -> Stage:
    """A stage of a call of n samples; changes: of its fields, or of x's and y's."""
    algorithm("winograd-4x4")  # or this build has none
    stage = Winograd(tile, 3).stage(problem, (problem.x_shape(n), problem.w_shape(), problem.y_shape(n)))
    for name, value in changes.items():
        of, _, field = name.partition("_of_")
        setattr(getattr(stage, field) if field else stage, of, value)
    return stage


@pytest.mark.parametrize(
    ("of_x", "of_y", "message"),
    [
        ((0, 512), (0, 1024), "holds 512 bytes; in elements of 4 bytes its sizes are 1024 bytes"),
        ((1, 1024), (1, 1024), "holds 1024 bytes; in elements of 2 bytes its sizes are 512 bytes"),
        ((1, 512), (2, 512), "the type of elements of y is 2; the other operands make it 1"),
        ((3, 2048), (3, 2048), "the type of elements is 3; allowed is 0 to 2"),
        ((-1, 512), (-1, 512), "the type of elements is -1; allowed is 0 to 2"),
    ],
    ids=["half as many bytes", "twice as many bytes", "two types", "unknown", "negative"],
)
def test_elements_that_are_not_what_they_are_said_to_be_are_refused(
    of_x: tuple[int, int], of_y: tuple[int, int], message: str
) -> None:
    x, y, w, u, scratch = (torch.ones(size) for size in (512, 512, 2**10, 2**14, 2**16))
    problem = ConvProblem(Operation.FORWARD, 4, 8, 8, 4, 3, 3, padding=(1, 1))
    described = {"element_of_x": of_x[0], "bytes_of_x": of_x[1], "element_of_y": of_y[0], "bytes_of_y": of_y[1]}
    described |= {"prepared_bytes": u.nbytes, "scratch_bytes": scratch.nbytes, "slice_count": 1}
    described["element_of_w"] = of_x[0]
    stage = stage_of(problem, 1, 4, phases=2, slices=(ctypes.c_int64 * 2)(0, 1), **described)
    addresses = (tensor.data_ptr() for tensor in (x, w, y))
    for entry in (function("winograd_stage"), function("implicit_gemm_stage")):
        with pytest.raises(InvalidInputError, match=message):
            entry(stage, *addresses, None, u.data_ptr(), scratch.data_ptr(), None)
        addresses = (tensor.data_ptr() for tensor in (x, w, y))


@by_name
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:1], "what is added to y holds"),
        (lambda t: torch.cat([t, t]), "what is added to y holds"),
        (lambda t: t.half(), "has dtype torch.float16; it must be that of the problem, float32"),
        (lambda t: t.to(memory_format=LAST[t.ndim]), "dense and contiguous"),
    ],
    ids=["fewer", "more", "half", "format"],
)
def test_what_is_added_that_is_not_as_y_is_refused(name: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    problem, chosen = problem_for(name, Operation.FORWARD), algorithm(name)
    operands, workspace = Operands(problem, chosen), chosen.workspace(problem, 2)
    y = operands.tensors["y"].clone()
    stage = chosen.bound(problem, 2, [slice(0, 2)], workspace)
    with pytest.raises(InvalidInputError, match=message):
        stage(*(tensor.data_ptr() for tensor in operands.tensors.values()), Epilogue("ReLU", change(y)))
    assert torch.equal(operands.tensors["y"], y)


@by_name
@by_operation
def test_groups_that_do_not_divide_the_channels_are_refused(name: str, operation: Operation) -> None:
    operands = Operands(problem_for(name, operation), algorithm(name))
    object.__setattr__(operands.problem, "groups", 4)
    for part in parts(operation):
        operands.assert_refused(part, "groups is 2; ")


# Changes of a stage, and the beginning of what is said about it.
FORGED: tuple[tuple[str, int, str], ...] = (
    ("operation", 3, "the operation is 3; allowed is 0 to 2"),
    ("threads", 0, "the number of threads is 0; allowed is 1 to"),
    ("prepared_bytes", -1, "prepared holds -1 bytes; the call needs"),
    ("groups_of_geometry", 0, "the number of groups is 0; allowed is 1 to"),
    ("stride_h_of_geometry", 0, "a filter size, stride or dilation is 0; allowed is 1 to"),
    ("first_tap_of_geometry", 7, "the last tap is|the depth is"),
    ("memory_format_of_x", 3, "the memory format is 3; allowed is 0 to 2"),
    ("memory_format_of_y", 1, "the memory format of y is 1; the other operands make it 0"),
    ("bytes_of_y", 3, "y holds 3 bytes; in elements of 4 bytes its sizes are"),
    ("bytes_of_w", 3, "the filter holds 3 bytes; in elements of 4 bytes its sizes are"),
    ("element_of_w", 1, "the type of elements of the filter is 1; the other operands make it 0"),
    ("size_0_of_w", 23, "the number of filters is 23; the other operands make it 22"),
    ("size_1_of_w", 19, "the number of channels of a filter is 19; the other operands make it 18"),
    ("size_3_of_w", 7, "the height of the filter is 7; the other operands make it"),
    ("size_4_of_w", 7, "the width of the filter is 7; the other operands make it"),
)


@pytest.mark.parametrize("name", EVERY)
@by_operation
@pytest.mark.parametrize("phases", [1, 2, 4])
def test_no_algorithm_forgets_a_check_in_any_phase(name: str, operation: Operation, phases: int) -> None:
    operands = Operands(problem_for(name, operation), algorithm(name))
    problem, chosen = operands.problem, operands.algorithm
    shapes = problem.x_shape(2), problem.w_shape(), problem.y_shape(2)
    sizes = 88, operands.tensors["prepared"].nbytes, operands.tensors["scratch"].nbytes
    before = {name: tensor.clone() for name, tensor in operands.tensors.items()}
    addresses = [operands.tensors[tensor].data_ptr() for tensor in ("x", "w", "y", "prepared", "scratch")]
    for change, value, message in FORGED:
        stage = chosen.stage(problem, shapes, phases, sizes, [slice(0, 2)])
        field, _, struct = change.partition("_of_")
        setattr(getattr(stage, struct) if struct else stage, field, value)
        with pytest.raises(InvalidInputError, match=message):
            function(f"{chosen.entry}_stage")(stage, *addresses[:3], None, *addresses[3:], None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in operands.tensors.items())


# ---- sizes ----------------------------------------------------------------------------------------------------------


@by_name
@by_operation
@pytest.mark.parametrize("threads", [1, 3])
def test_billions_of_samples_need_as_much_as_a_million(name: str, operation: Operation, threads: int) -> None:
    torch.set_num_threads(threads)
    a = algorithm(name)
    for changes in ({}, {"c": 64, "h": 56, "w": 56, "k": 64}, {"groups": 2}):
        problem = problem_for(name, operation, **changes)
        million = a.workspace(problem, 10**6)
        assert million.scratch_bytes >= a.workspace(problem, 1).scratch_bytes > 0
        assert {a.workspace(problem, n) for n in BILLIONS} == {million}


@by_name
@by_operation
@pytest.mark.parametrize("n", [2**63 - 1, 2**63, 10**30])
def test_a_batch_that_64_bits_cannot_count_is_refused_or_needs_as_much(name: str, operation: Operation, n: int) -> None:
    problem, a = problem_for(name, operation), algorithm(name)
    try:
        assert a.workspace(problem, n) == a.workspace(problem, 10**6)
    except InvalidInputError as error:
        assert "more than 64 bits" in str(error)  # noqa: PT017
