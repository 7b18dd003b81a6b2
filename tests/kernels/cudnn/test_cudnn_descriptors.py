"""Descriptors: what is set and read, in which C types, how long they live; and the graphs that are made of them."""

from __future__ import annotations

import copy
import ctypes
import gc
import weakref
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cudnn.library import BAD_PARAM, FakeCudnn

from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.kernels.cudnn.constants import Attribute, AttributeType, DescriptorKind
from mucudnn.kernels.cudnn.descriptor import Descriptor, operation_graph
from mucudnn.kernels.cudnn.library import CudnnError, Library
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

PROBLEM = ConvProblem(Operation.FORWARD, 4, 9, 8, 6, 3, 2, (2, 1), (1, 0), (1, 2), 2)


def loaded(cudnn: FakeCudnn) -> Library:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda path: cudnn)
        return Library("fake")


def content(cudnn: FakeCudnn, kind: DescriptorKind) -> list[dict[int, list[object]]]:
    return [made.content for made in cudnn.made if made.kind == kind]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (AttributeType.INT64, (1, -(2**40))),
        (AttributeType.FLOAT, (0.5,)),
        (AttributeType.DOUBLE, (0.1, 3.0)),
        (AttributeType.DATA_TYPE, (9,)),
        (AttributeType.HANDLE, (2**47,)),
    ],
)
def test_numbers_are_handed_over_in_their_c_type(kind: AttributeType, values: tuple[float, ...]) -> None:
    cudnn = FakeCudnn()
    descriptor = Descriptor(loaded(cudnn), DescriptorKind.TENSOR).set(Attribute.TENSOR_DIMENSIONS, kind, *values)
    assert content(cudnn, DescriptorKind.TENSOR) == [{Attribute.TENSOR_DIMENSIONS: list(values)}]
    assert descriptor.numbers(Attribute.TENSOR_DIMENSIONS, kind, 5) == values
    assert descriptor.numbers(Attribute.TENSOR_DIMENSIONS, kind, 1) == values[:1]
    assert descriptor.count(Attribute.TENSOR_DIMENSIONS, kind) == len(values)


def test_text_comes_back_as_it_was() -> None:
    attribute = Attribute.DEVICEPROP_JSON_REPRESENTATION
    descriptor = Descriptor(loaded(FakeCudnn()), DescriptorKind.DEVICEPROP).set_text(attribute, '{"name": "é"}')
    assert descriptor.text(attribute) == '{"name": "é"}'


def test_what_is_referred_to_lives_as_long_and_no_longer() -> None:
    cudnn = FakeCudnn()
    library = loaded(cudnn)
    operation = Descriptor(library, DescriptorKind.OPERATION_CONVOLUTION_FORWARD).finalize()
    graph = Descriptor(library, DescriptorKind.OPERATIONGRAPH).refer(Attribute.OPERATIONGRAPH_OPS, operation)
    seen = weakref.ref(operation)
    del operation
    assert seen() is not None
    assert len(cudnn.alive) == 2
    del graph
    gc.collect()
    assert seen() is None
    assert not cudnn.alive


def test_an_error_leaves_nothing_alive() -> None:
    cudnn = FakeCudnn()
    cudnn.refused["cudnnBackendFinalize"] = (BAD_PARAM, b"(0 != xDimA[1] % wDimA[1])")
    with pytest.raises(CudnnError, match=r"finalize CONVOLUTION: CUDNN_STATUS_BAD_PARAM: \(0 != xDimA"):
        operation_graph(loaded(cudnn), PROBLEM, 1)
    gc.collect()
    assert not cudnn.alive


def test_what_was_never_made_is_not_destroyed() -> None:
    cudnn = FakeCudnn()
    cudnn.refused["cudnnBackendCreateDescriptor"] = (BAD_PARAM, b"")
    with pytest.raises(CudnnError, match="make TENSOR"):
        Descriptor(loaded(cudnn), DescriptorKind.TENSOR)
    gc.collect()
    assert "cudnnBackendDestroyDescriptor" not in cudnn.calls


def test_a_failure_to_destroy_is_not_raised() -> None:
    cudnn = FakeCudnn()
    descriptor = Descriptor(loaded(cudnn), DescriptorKind.TENSOR)
    cudnn.refused["cudnnBackendDestroyDescriptor"] = (BAD_PARAM, b"")
    del descriptor  # an exception here would be a warning, and that an error
    gc.collect()
    assert cudnn.calls[-1] == "cudnnBackendDestroyDescriptor"


def test_a_copy_would_be_destroyed_twice_and_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(Descriptor(loaded(FakeCudnn()), DescriptorKind.TENSOR))


@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("operation", Operation)
def test_a_graph_has_the_tensors_of_torch(operation: Operation, memory_format: MemoryFormat) -> None:
    cudnn = FakeCudnn()
    problem = ConvProblem(operation, *(4, 9, 8, 6, 3, 2), (2, 1), (1, 0), (1, 2), 2, memory_format=memory_format)
    graph = operation_graph(loaded(cudnn), problem, 5, beta=0.5)
    shapes = problem.x_shape(5), problem.w_shape(), problem.y_shape(5)
    expected = [torch.empty(shape).contiguous(memory_format=TORCH_FORMATS[memory_format]).stride() for shape in shapes]
    tensors = {made[Attribute.TENSOR_UNIQUE_ID][0]: made for made in content(cudnn, DescriptorKind.TENSOR)}
    assert [tuple(tensors[uid][Attribute.TENSOR_DIMENSIONS]) for uid in (1, 2, 3)] == list(shapes)
    assert [tuple(tensors[uid][Attribute.TENSOR_STRIDES]) for uid in (1, 2, 3)] == expected
    (convolution,) = content(cudnn, DescriptorKind.CONVOLUTION)
    assert convolution[Attribute.CONVOLUTION_FILTER_STRIDES] == [2, 1]
    assert convolution[Attribute.CONVOLUTION_DILATIONS] == [1, 2]
    assert convolution[Attribute.CONVOLUTION_PRE_PADDINGS] == convolution[Attribute.CONVOLUTION_POST_PADDINGS] == [1, 0]
    (graph_content,) = content(cudnn, DescriptorKind.OPERATIONGRAPH)
    assert Attribute.OPERATIONGRAPH_HANDLE not in graph_content
    (operation_content,) = graph_content[Attribute.OPERATIONGRAPH_OPS]
    assert [value for value in operation_content.values() if value in ([1.0], [0.5])] == [[1.0], [0.5]]  # alpha, beta
    del graph


@pytest.mark.parametrize(
    ("dtype", "code", "sums"), [("float32", 0, 0), ("float16", 2, 0), ("bfloat16", 9, 0), ("float64", 1, 1)]
)
def test_sums_are_in_float32_and_those_of_float64_in_float64(dtype: str, code: int, sums: int) -> None:
    cudnn = FakeCudnn()
    operation_graph(loaded(cudnn), ConvProblem(Operation.FORWARD, 4, 8, 8, 4, 3, 3, dtype=dtype), 1)
    assert {made[Attribute.TENSOR_DATA_TYPE][0] for made in content(cudnn, DescriptorKind.TENSOR)} == {code}
    assert content(cudnn, DescriptorKind.CONVOLUTION)[0][Attribute.CONVOLUTION_COMP_TYPE] == [sums]


@given(
    c=st.integers(1, 9),
    h=st.integers(1, 9),
    w=st.integers(1, 9),
    dtype=st.sampled_from(["float64", "float32", "float16"]),
    n=st.integers(1, 24),
)
def test_slices_are_aligned_as_declared_where_executables_place_them(
    c: int, h: int, w: int, dtype: str, n: int
) -> None:
    cudnn = FakeCudnn()
    problem = ConvProblem(Operation.FORWARD, c, h, w, 3, 1, 1, dtype=dtype)
    operation_graph(loaded(cudnn), problem, n)
    power = n & -n  # slices of n samples begin at its multiples: see test_executable.py
    for made in content(cudnn, DescriptorKind.TENSOR):
        (uid,), (alignment,) = made[Attribute.TENSOR_UNIQUE_ID], made[Attribute.TENSOR_BYTE_ALIGNMENT]
        sample_bytes = 0 if uid == 2 else prod((c, h, w) if uid == 1 else (3, h, w)) * problem.item_bytes
        starts = [place * power * sample_bytes for place in range(17)]
        assert all(start % alignment == 0 for start in starts)  # type: ignore[operator]
        assert alignment == 16 or any(start % (2 * alignment) for start in starts)  # type: ignore[operator]
