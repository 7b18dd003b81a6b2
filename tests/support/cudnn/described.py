"""A GPU that need not be here, of which cuDNN 9.8 and later list engines: an H200, by the properties that it has."""

from __future__ import annotations

from dataclasses import dataclass

from support.places import DATA

from mucudnn.core.problem import ConvProblem
from mucudnn.kernels.cudnn.backend import Engine, offered_engines
from mucudnn.kernels.cudnn.descriptor import Attribute, Descriptor, DescriptorKind, operation_graph
from mucudnn.kernels.cudnn.library import Library

OLDEST_VERSION = 90800
H200 = DATA / "h200.json"


@dataclass(frozen=True)
class DescribedDevice:
    library: Library
    properties: Descriptor

    def engines(self, problem: ConvProblem, n: int) -> list[Engine]:
        return offered_engines(operation_graph(self.library, problem, n), self.properties)


def described_h200(library: Library) -> DescribedDevice:
    properties = Descriptor(library, DescriptorKind.DEVICEPROP)
    properties.set(Attribute.DEVICEPROP_JSON_REPRESENTATION, *H200.read_bytes())
    return DescribedDevice(library, properties.finalize())
