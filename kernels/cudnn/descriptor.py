"""Descriptors of cuDNN 9's backend API, their constants, and the operation graph of a convolution.

The constants (``cudnn_graph.h``) are stable within the major version. Enum members are named as in the header, without
the prefix. A test compares every member with the header if the header is installed.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from math import gcd
from typing import Any, NoReturn, Self

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.cudnn.library import Library


class DescriptorKind(IntEnum):
    """Kinds of cuDNN descriptors: ``CUDNN_BACKEND_..._DESCRIPTOR``."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    KNOB_CHOICE = 7
    OPERATION_CONVOLUTION_FORWARD = 10
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12
    OPERATIONGRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17
    DEVICEPROP = 38


class AttributeType(IntEnum):
    """Types of attribute values of cuDNN descriptors: ``CUDNN_TYPE_...``."""

    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    VOID_PTR = 6
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    BACKEND_DESCRIPTOR = 15
    CHAR = 24


class Attribute(IntEnum):
    """Attributes of cuDNN descriptors: ``CUDNN_ATTR_...``."""

    CONVOLUTION_COMP_TYPE = 100
    CONVOLUTION_CONV_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_FILTER_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_SPATIAL_DIMS = 106
    ENGINEHEUR_MODE = 200
    ENGINEHEUR_OPERATION_GRAPH = 201
    ENGINEHEUR_RESULTS = 202
    ENGINEHEUR_DEVICEPROP = 204
    ENGINECFG_ENGINE = 300
    ENGINECFG_KNOB_CHOICES = 302
    ENGINECFG_WORKSPACE_SIZE = 303
    EXECUTION_PLAN_HANDLE = 400
    EXECUTION_PLAN_ENGINE_CONFIG = 401
    EXECUTION_PLAN_WORKSPACE_SIZE = 402
    EXECUTION_PLAN_DEVICEPROP = 407
    KNOB_CHOICE_KNOB_TYPE = 600
    KNOB_CHOICE_KNOB_VALUE = 601
    OPERATION_CONVOLUTION_FORWARD_ALPHA = 700
    OPERATION_CONVOLUTION_FORWARD_BETA = 701
    OPERATION_CONVOLUTION_FORWARD_CONV_DESC = 702
    OPERATION_CONVOLUTION_FORWARD_W = 703
    OPERATION_CONVOLUTION_FORWARD_X = 704
    OPERATION_CONVOLUTION_FORWARD_Y = 705
    OPERATION_CONVOLUTION_BWD_DATA_ALPHA = 706
    OPERATION_CONVOLUTION_BWD_DATA_BETA = 707
    OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC = 708
    OPERATION_CONVOLUTION_BWD_DATA_W = 709
    OPERATION_CONVOLUTION_BWD_DATA_DX = 710
    OPERATION_CONVOLUTION_BWD_DATA_DY = 711
    OPERATION_CONVOLUTION_BWD_FILTER_ALPHA = 712
    OPERATION_CONVOLUTION_BWD_FILTER_BETA = 713
    OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC = 714
    OPERATION_CONVOLUTION_BWD_FILTER_DW = 715
    OPERATION_CONVOLUTION_BWD_FILTER_X = 716
    OPERATION_CONVOLUTION_BWD_FILTER_DY = 717
    OPERATIONGRAPH_HANDLE = 800
    OPERATIONGRAPH_OPS = 801
    TENSOR_BYTE_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_UNIQUE_ID = 906
    VARIANT_PACK_UNIQUE_IDS = 1000
    VARIANT_PACK_DATA_POINTERS = 1001
    VARIANT_PACK_WORKSPACE = 1003
    ENGINE_OPERATION_GRAPH = 1300
    ENGINE_GLOBAL_INDEX = 1301
    ENGINE_NUMERICAL_NOTE = 1303
    ENGINE_DEVICEPROP = 1307
    DEVICEPROP_JSON_REPRESENTATION = 2702


class NumericalNote(IntEnum):
    """Those of cuDNN's notes on the numerical properties of an engine that matter: ``CUDNN_NUMERICAL_NOTE_...``."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4x4 = 6
    WINOGRAD_TILE_6x6 = 7
    WINOGRAD_TILE_13x13 = 8


class HeuristicMode(IntEnum):
    """The lists of engines that cuDNN can return: ``CUDNN_HEUR_MODE_...``.

    A is the thorough list, FALLBACK the list to use if no engine of A works.
    """

    FALLBACK = 2
    A = 3


CROSS_CORRELATION = 1  # CUDNN_CROSS_CORRELATION, the operation that torch calls convolution
DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}  # values of CUDNN_DATA_...


_C_TYPES: dict[AttributeType, Any] = {
    AttributeType.HANDLE: ctypes.c_void_p,
    AttributeType.INT64: ctypes.c_int64,
    AttributeType.FLOAT: ctypes.c_float,
    AttributeType.DOUBLE: ctypes.c_double,
    AttributeType.BOOLEAN: ctypes.c_bool,
    AttributeType.VOID_PTR: ctypes.c_void_p,
    AttributeType.CHAR: ctypes.c_char,
}  # All other attribute types are enumerations of type int.
_KINDS_OF_VALUES = {  # the types of attributes that are no 64-bit integers; ALPHA and BETA have that of the sums
    Attribute.CONVOLUTION_COMP_TYPE: AttributeType.DATA_TYPE,
    Attribute.CONVOLUTION_CONV_MODE: AttributeType.CONVOLUTION_MODE,
    Attribute.ENGINEHEUR_MODE: AttributeType.HEUR_MODE,
    Attribute.EXECUTION_PLAN_HANDLE: AttributeType.HANDLE,
    Attribute.KNOB_CHOICE_KNOB_TYPE: AttributeType.KNOB_TYPE,
    Attribute.OPERATIONGRAPH_HANDLE: AttributeType.HANDLE,
    Attribute.TENSOR_DATA_TYPE: AttributeType.DATA_TYPE,
    Attribute.VARIANT_PACK_DATA_POINTERS: AttributeType.VOID_PTR,
    Attribute.VARIANT_PACK_WORKSPACE: AttributeType.VOID_PTR,
    Attribute.ENGINE_NUMERICAL_NOTE: AttributeType.NUMERICAL_NOTE,
    Attribute.DEVICEPROP_JSON_REPRESENTATION: AttributeType.CHAR,
}
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

    def set(self, attribute: Attribute, *values: float | Descriptor, kind: AttributeType | None = None) -> Self:
        """Set an attribute to numbers, or to other descriptors, which this one keeps alive, and return this descriptor.

        Without values nothing is set.

        kind: the type of numbers, if not always the same for the attribute.
        """
        if values:
            descriptors = [value for value in values if isinstance(value, Descriptor)]
            self._kept += descriptors
            if descriptors:
                kind, array = AttributeType.BACKEND_DESCRIPTOR, (ctypes.c_void_p * len(descriptors))()
                array[:] = [descriptor.pointer.value for descriptor in descriptors]
            else:
                kind = _KINDS_OF_VALUES.get(attribute, AttributeType.INT64) if kind is None else kind
                array = (_C_TYPES.get(kind, ctypes.c_int) * len(values))(*values)
            pointer = ctypes.cast(array, ctypes.c_void_p)
            action = f"set {attribute.name}"
            self.library.call("cudnnBackendSetAttribute", action, self.pointer, attribute, kind, len(values), pointer)
        return self

    def finalize(self) -> Self:
        self.library.call("cudnnBackendFinalize", f"finalize {self.kind.name}", self.pointer)
        return self

    def numbers(self, attribute: Attribute, limit: int = 1) -> tuple[int, ...]:
        """Return the first ``limit`` values of an attribute, or all if there are fewer."""
        kind = _KINDS_OF_VALUES.get(attribute, AttributeType.INT64)
        values = (_C_TYPES.get(kind, ctypes.c_int) * limit)()
        return tuple(values[: self._get(attribute, kind, limit, values)])

    def descriptors(self, attribute: Attribute, kind: DescriptorKind, limit: int | None = None) -> list[Descriptor]:
        """Return the first ``limit`` descriptors of an attribute, or all, as copies that may outlive this one."""
        if limit is None:
            limit = self._get(attribute, AttributeType.BACKEND_DESCRIPTOR, 0, None)
        copies = [Descriptor(self.library, kind) for _ in range(limit)]
        pointers = (ctypes.c_void_p * limit)(*(descriptor.pointer.value for descriptor in copies))
        return copies[: self._get(attribute, AttributeType.BACKEND_DESCRIPTOR, limit, pointers)]

    def _get(self, attribute: Attribute, kind: AttributeType, limit: int, values: ctypes.Array[Any] | None) -> int:
        """Write at most ``limit`` values of an attribute into ``values``, and return the count that cuDNN reports."""
        action, count = f"get {attribute.name}", ctypes.c_int64()
        pointer = None if values is None else ctypes.cast(values, ctypes.c_void_p)
        arguments = (self.pointer, attribute, kind, limit, ctypes.byref(count), pointer)
        self.library.call("cudnnBackendGetAttribute", action, *arguments)
        return count.value


def operation_graph(
    library: Library, problem: ConvProblem, n: int, *, beta: float = 0.0, handle: int = 0
) -> Descriptor:
    """Return cuDNN's operation graph of ``problem`` on ``n`` samples: result = operation + beta * result.

    x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), dense in the problem's memory format. w and the
    mini-batches of x and y are aligned to 16 bytes. A slice of n samples begins at a multiple of the largest power of
    two that divides n, as ``Executable`` ensures. Sums are in float32, or in float64 for float64 problems.

    handle: cuDNN's handle of the device, 0 if there is none.

    Raises ``CudnnError`` if cuDNN refuses the geometry.
    """
    kind, name, operands = _KINDS[problem.operation]
    is_double = problem.dtype == "float64"
    convolution = (
        Descriptor(library, DescriptorKind.CONVOLUTION)
        .set(Attribute.CONVOLUTION_COMP_TYPE, DATA_TYPES["float64" if is_double else "float32"])
        .set(Attribute.CONVOLUTION_CONV_MODE, CROSS_CORRELATION)
        .set(Attribute.CONVOLUTION_DILATIONS, *problem.dilation)
        .set(Attribute.CONVOLUTION_FILTER_STRIDES, *problem.stride)
        .set(Attribute.CONVOLUTION_PRE_PADDINGS, *problem.padding)
        .set(Attribute.CONVOLUTION_POST_PADDINGS, *problem.padding)
        .set(Attribute.CONVOLUTION_SPATIAL_DIMS, 2)
        .finalize()
    )
    fields = ("CONV_DESC", "ALPHA", "BETA", *operands)
    attributes = {field: Attribute[f"OPERATION_CONVOLUTION_{name}_{field}"] for field in fields}
    operation = Descriptor(library, kind).set(attributes["CONV_DESC"], convolution)
    shapes = problem.x_shape(n), problem.w_shape(), problem.y_shape(n)
    for operand, (size, channels, height, width), uid in zip(operands, shapes, (X_ID, W_ID, Y_ID), strict=True):
        sample = channels * height * width
        channels_last = problem.memory_format is MemoryFormat.CHANNELS_LAST
        strides = (sample, 1, width * channels, channels) if channels_last else (sample, height * width, width, 1)
        # Of a slice: the largest power of two that divides its size.
        aligned = MOST_ALIGNED_BYTES if uid == W_ID else gcd(MOST_ALIGNED_BYTES, size * sample * problem.item_bytes)
        tensor = (
            Descriptor(library, DescriptorKind.TENSOR)
            .set(Attribute.TENSOR_DATA_TYPE, DATA_TYPES[problem.dtype])
            .set(Attribute.TENSOR_DIMENSIONS, size, channels, height, width)
            .set(Attribute.TENSOR_STRIDES, *strides)
            .set(Attribute.TENSOR_UNIQUE_ID, uid)
            .set(Attribute.TENSOR_BYTE_ALIGNMENT, aligned)
            .finalize()
        )
        operation.set(attributes[operand], tensor)
    scale = AttributeType.DOUBLE if is_double else AttributeType.FLOAT
    operation.set(attributes["ALPHA"], 1.0, kind=scale).set(attributes["BETA"], beta, kind=scale).finalize()
    graph = Descriptor(library, DescriptorKind.OPERATIONGRAPH)
    graph.set(Attribute.OPERATIONGRAPH_HANDLE, *([handle] if handle else []))
    return graph.set(Attribute.OPERATIONGRAPH_OPS, operation).finalize()
