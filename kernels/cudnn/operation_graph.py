"""Makes cuDNN's operation graph of one micro-batch's convolution: three tensors and one operation."""

from __future__ import annotations

from math import gcd, prod

from mucudnn.kernels.cudnn.constants import CROSS_CORRELATION, DATA_TYPES, Attribute, AttributeType, DescriptorKind
from mucudnn.kernels.cudnn.descriptor import Descriptor
from mucudnn.kernels.cudnn.library import Library
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

X_ID, W_ID, Y_ID = 1, 2, 3  # of the tensors, where pointers are given
MOST_ALIGNED_BYTES = 16  # cuDNN tells no more apart

_KINDS = {
    Operation.FORWARD: (DescriptorKind.OPERATION_CONVOLUTION_FORWARD, "FORWARD", ("X", "W", "Y")),
    Operation.BACKWARD_DATA: (DescriptorKind.OPERATION_CONVOLUTION_BACKWARD_DATA, "BWD_DATA", ("DX", "W", "DY")),
    Operation.BACKWARD_FILTER: (DescriptorKind.OPERATION_CONVOLUTION_BACKWARD_FILTER, "BWD_FILTER", ("X", "DW", "DY")),
}


def operation_graph(
    library: Library, problem: ConvProblem, n: int, *, beta: float = 0.0, handle: int = 0
) -> Descriptor:
    """Make the graph of ``problem`` on ``n`` samples: result = operation + beta * result.

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), dense in the problem's memory format. w begins on a
    multiple of 16 bytes, and so do the mini-batches whose slices x and y are; a slice of n samples begins at a sample
    whose number is a multiple of the largest power of two that divides n (``Executable`` places them so). handle: of
    the device, 0 where there is none. Sums are in float32, those of float64 in float64.

    Raises ``CudnnError`` where cuDNN refuses the geometry.
    """
    kind, name, operands = _KINDS[problem.operation]
    shapes = problem.x_shape(n), problem.w_shape(), problem.y_shape(n)
    alignments = (_alignment(problem, shapes[0]), MOST_ALIGNED_BYTES, _alignment(problem, shapes[2]))
    operation = Descriptor(library, kind).refer(_attribute(name, "CONV_DESC"), _convolution(library, problem))
    for operand, shape, alignment, uid in zip(operands, shapes, alignments, (X_ID, W_ID, Y_ID), strict=True):
        operation.refer(_attribute(name, operand), _tensor(library, problem, shape, alignment, uid))
    scale = AttributeType.DOUBLE if problem.dtype == "float64" else AttributeType.FLOAT
    operation.set(_attribute(name, "ALPHA"), scale, 1.0).set(_attribute(name, "BETA"), scale, beta).finalize()
    graph = Descriptor(library, DescriptorKind.OPERATIONGRAPH)
    if handle:
        graph.set(Attribute.OPERATIONGRAPH_HANDLE, AttributeType.HANDLE, handle)
    return graph.refer(Attribute.OPERATIONGRAPH_OPS, operation).finalize()


def _attribute(operation: str, what: str) -> Attribute:
    return Attribute[f"OPERATION_CONVOLUTION_{operation}_{what}"]


def _convolution(library: Library, problem: ConvProblem) -> Descriptor:
    computed_in = "float64" if problem.dtype == "float64" else "float32"
    return (
        Descriptor(library, DescriptorKind.CONVOLUTION)
        .set(Attribute.CONVOLUTION_COMP_TYPE, AttributeType.DATA_TYPE, DATA_TYPES[computed_in])
        .set(Attribute.CONVOLUTION_CONV_MODE, AttributeType.CONVOLUTION_MODE, CROSS_CORRELATION)
        .set(Attribute.CONVOLUTION_DILATIONS, AttributeType.INT64, *problem.dilation)
        .set(Attribute.CONVOLUTION_FILTER_STRIDES, AttributeType.INT64, *problem.stride)
        .set(Attribute.CONVOLUTION_PRE_PADDINGS, AttributeType.INT64, *problem.padding)
        .set(Attribute.CONVOLUTION_POST_PADDINGS, AttributeType.INT64, *problem.padding)
        .set(Attribute.CONVOLUTION_SPATIAL_DIMS, AttributeType.INT64, 2)
        .finalize()
    )


def _tensor(
    library: Library, problem: ConvProblem, shape: tuple[int, int, int, int], alignment: int, uid: int
) -> Descriptor:
    return (
        Descriptor(library, DescriptorKind.TENSOR)
        .set(Attribute.TENSOR_DATA_TYPE, AttributeType.DATA_TYPE, DATA_TYPES[problem.dtype])
        .set(Attribute.TENSOR_DIMENSIONS, AttributeType.INT64, *shape)
        .set(Attribute.TENSOR_STRIDES, AttributeType.INT64, *_strides(shape, problem.memory_format))
        .set(Attribute.TENSOR_UNIQUE_ID, AttributeType.INT64, uid)
        .set(Attribute.TENSOR_BYTE_ALIGNMENT, AttributeType.INT64, alignment)
        .finalize()
    )


def _strides(shape: tuple[int, int, int, int], memory_format: MemoryFormat) -> tuple[int, int, int, int]:
    """Return the strides of a dense tensor, in elements."""
    _, channels, height, width = shape
    if memory_format is MemoryFormat.CHANNELS_LAST:
        return (channels * height * width, 1, width * channels, channels)
    return (channels * height * width, height * width, width, 1)


def _alignment(problem: ConvProblem, shape: tuple[int, int, int, int]) -> int:
    """Return the bytes on whose multiples slices begin: the largest power of two in their size, at most 16."""
    return gcd(MOST_ALIGNED_BYTES, prod(shape) * problem.item_bytes)
