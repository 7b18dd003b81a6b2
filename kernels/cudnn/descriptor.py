"""Descriptors of cuDNN's backend API, and the operation graph of a convolution."""

from __future__ import annotations

import ctypes
from math import gcd, prod
from typing import Any, NoReturn, Self

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.cudnn.constants import CROSS_CORRELATION, DATA_TYPES, Attribute, AttributeType, DescriptorKind
from mucudnn.kernels.cudnn.library import Library

_C_TYPES: dict[AttributeType, Any] = {
    AttributeType.HANDLE: ctypes.c_void_p,
    AttributeType.INT64: ctypes.c_int64,
    AttributeType.FLOAT: ctypes.c_float,
    AttributeType.DOUBLE: ctypes.c_double,
    AttributeType.BOOLEAN: ctypes.c_bool,
    AttributeType.VOID_PTR: ctypes.c_void_p,
    AttributeType.CHAR: ctypes.c_char,
}  # All other attribute types are enumerations of type int.
X_ID, W_ID, Y_ID = 1, 2, 3  # numbers of the tensors in a variant pack
MOST_ALIGNED_BYTES = 16  # cuDNN does not distinguish larger alignments.

_KINDS = {
    Operation.FORWARD: (DescriptorKind.OPERATION_CONVOLUTION_FORWARD, "FORWARD", ("X", "W", "Y")),
    Operation.BACKWARD_DATA: (DescriptorKind.OPERATION_CONVOLUTION_BACKWARD_DATA, "BWD_DATA", ("DX", "W", "DY")),
    Operation.BACKWARD_FILTER: (DescriptorKind.OPERATION_CONVOLUTION_BACKWARD_FILTER, "BWD_FILTER", ("X", "DW", "DY")),
}


class Descriptor:
    """A descriptor (object) of cuDNN's backend API, which is destroyed together with this Python object.

    Every method raises ``CudnnError`` if cuDNN fails.
    """

    def __init__(self, library: Library, kind: DescriptorKind) -> None:
        self.library, self.kind = library, kind
        self.pointer = ctypes.c_void_p()
        self._kept: list[Descriptor] = []
        library.call("cudnnBackendCreateDescriptor", f"make {kind.name}", kind, ctypes.byref(self.pointer))

    def __del__(self) -> None:
        if self.pointer:  # The pointer is null if creating the descriptor failed.
            self.library.destroy("cudnnBackendDestroyDescriptor", self.pointer)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a descriptor of cuDNN cannot be copied: each is destroyed once")

    def set(self, attribute: Attribute, kind: AttributeType, *values: float) -> Self:
        """Set an attribute of the descriptor to one or more numbers, and return the descriptor."""
        return self._set(attribute, kind, len(values), (_C_TYPES.get(kind, ctypes.c_int) * len(values))(*values))

    def refer(self, attribute: Attribute, *others: Descriptor) -> Self:
        """Set an attribute to other descriptors, which this one keeps alive, and return this descriptor."""
        self._kept += others
        pointers = (ctypes.c_void_p * len(others))(*(other.pointer.value for other in others))
        return self._set(attribute, AttributeType.BACKEND_DESCRIPTOR, len(others), pointers)

    def finalize(self) -> Self:
        self.library.call("cudnnBackendFinalize", f"finalize {self.kind.name}", self.pointer)
        return self

    def number(self, attribute: Attribute, kind: AttributeType = AttributeType.INT64) -> int:
        (value,) = self.numbers(attribute, kind, 1)
        return value

    def numbers(self, attribute: Attribute, kind: AttributeType, most: int) -> tuple[int, ...]:
        """Return the first ``most`` values of an attribute, or all if there are fewer."""
        values = (_C_TYPES.get(kind, ctypes.c_int) * most)()
        return tuple(values[: self._get(attribute, kind, most, values)])

    def count(self, attribute: Attribute, kind: AttributeType) -> int:
        """Return the number of values that an attribute of the descriptor has."""
        return self._get(attribute, kind, 0, None)

    def descriptors(self, attribute: Attribute, kind: DescriptorKind, most: int) -> list[Descriptor]:
        """Return the first ``most`` descriptors of an attribute, as copies that may outlive this descriptor."""
        found = [Descriptor(self.library, kind) for _ in range(most)]
        pointers = (ctypes.c_void_p * most)(*(descriptor.pointer.value for descriptor in found))
        return found[: self._get(attribute, AttributeType.BACKEND_DESCRIPTOR, most, pointers)]

    def _set(self, attribute: Attribute, kind: AttributeType, count: int, values: ctypes.Array[Any]) -> Self:
        what = f"set {attribute.name}"
        pointer = ctypes.cast(values, ctypes.c_void_p)
        self.library.call("cudnnBackendSetAttribute", what, self.pointer, attribute, kind, count, pointer)
        return self

    def _get(self, attribute: Attribute, kind: AttributeType, most: int, values: ctypes.Array[Any] | None) -> int:
        """Write at most ``most`` values of an attribute into ``values``, and return the count that cuDNN reports."""
        what, found = f"get {attribute.name}", ctypes.c_int64()
        pointer = None if values is None else ctypes.cast(values, ctypes.c_void_p)
        arguments = (self.pointer, attribute, kind, most, ctypes.byref(found), pointer)
        self.library.call("cudnnBackendGetAttribute", what, *arguments)
        return found.value


def operation_graph(
    library: Library, problem: ConvProblem, n: int, *, beta: float = 0.0, handle: int = 0
) -> Descriptor:
    """Return cuDNN's operation graph of ``problem`` on ``n`` samples: result = operation + beta * result.

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), dense in the problem's memory format. w and the
    mini-batches of x and y are aligned to 16 bytes. A slice of n samples begins at a multiple of the largest power of
    two that divides n, as ``Executable`` ensures. handle: cuDNN's handle of the device, 0 if there is none. Sums are in
    float32, or in float64 for float64 problems.

    Raises ``CudnnError`` if cuDNN refuses the geometry.
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
    """Return the strides, in elements, of a dense tensor in the problem's memory format."""
    _, channels, height, width = shape
    if memory_format is MemoryFormat.CHANNELS_LAST:
        return (channels * height * width, 1, width * channels, channels)
    return (channels * height * width, height * width, width, 1)


def _alignment(problem: ConvProblem, shape: tuple[int, int, int, int]) -> int:
    """Return the alignment of micro-batches in bytes: the largest power of two that divides their size, at most 16."""
    return gcd(MOST_ALIGNED_BYTES, prod(shape) * problem.item_bytes)
