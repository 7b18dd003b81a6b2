"""Constants of cuDNN 9's backend API (``cudnn_graph.h``), which are stable within the major version.

Enum members are named as in the header, without the prefix. A test compares every member with the header if the header
is installed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Self


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
    BEHAVIOR_NOTE = 19
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
    ENGINE_BEHAVIOR_NOTE = 1305
    ENGINE_DEVICEPROP = 1307
    DEVICEPROP_JSON_REPRESENTATION = 2702


class _Note(IntEnum):
    """Base class of cuDNN's notes on engines. Notes added by newer cuDNN versions are named by their number."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int):
            return None
        note = int.__new__(cls, value)
        note._name_, note._value_ = f"NOTE_{value}", value
        return note


class NumericalNote(_Note):
    """cuDNN's notes on the numerical properties of an engine: ``CUDNN_NUMERICAL_NOTE_...``."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4x4 = 6
    WINOGRAD_TILE_6x6 = 7
    WINOGRAD_TILE_13x13 = 8
    STRICT_NAN_PROP = 9


class BehaviorNote(_Note):
    """cuDNN's notes on the requirements and abilities of an engine: ``CUDNN_BEHAVIOR_NOTE_...``."""

    RUNTIME_COMPILATION = 0
    REQUIRES_FILTER_INT8x32_REORDER = 1
    REQUIRES_BIAS_INT8x32_REORDER = 2
    SUPPORTS_CUDA_GRAPH_NATIVE_API = 3
    CUBLASLT_DEPENDENCY = 4


class HeuristicMode(IntEnum):
    """The lists of engines that cuDNN can return: ``CUDNN_HEUR_MODE_...``.

    A is the thorough list, FALLBACK the list to use if no engine of A works.
    """

    FALLBACK = 2
    A = 3


CROSS_CORRELATION = 1  # CUDNN_CROSS_CORRELATION, the operation that torch calls convolution
DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}  # values of CUDNN_DATA_...
