"""Devices whose engines cuDNN can list: the current device, or one that is described by its properties only.

``devices/`` has descriptions in cuDNN's JSON format: the ``Device.properties_json`` of real devices. For described
devices, cuDNN does not list the engines that depend on cuBLASLt, nor a few others.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from mucudnn.kernels.cudnn.constants import Attribute, AttributeType, DescriptorKind
from mucudnn.kernels.cudnn.descriptor import Descriptor, operation_graph
from mucudnn.kernels.cudnn.engines import Engine, every_engine, offered_engines
from mucudnn.kernels.cudnn.library import CudnnError, Library, library
from mucudnn.words.errors import InvalidInputError, UnavailableError
from mucudnn.words.problem import ConvProblem

OLDEST_DESCRIBED_VERSION = 90800
_BUILT_IN = {path.stem: path for path in (Path(__file__).parent / "devices").glob("*.json")}


class Handle:
    """The cuDNN handle of the current CUDA device, destroyed together with this object.

    Raises ``CudnnError`` if there is no device.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.pointer = ctypes.c_void_p()
        library.call("cudnnCreate", "make a handle of the current CUDA device", ctypes.byref(self.pointer))

    def __del__(self) -> None:
        if self.pointer:
            self.library.destroy("cudnnDestroy", self.pointer)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a handle of cuDNN cannot be copied: each is destroyed once")


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device whose engines cuDNN lists: one that is present (``handle``), or one described by ``properties``."""

    library: Library
    properties: Descriptor | None = None
    handle: Handle | None = None

    @property
    def properties_json(self) -> str:
        """The properties of the device as JSON, in the format that ``described_device`` reads.

        Raises ``CudnnError`` before cuDNN 9.8.
        """
        return (self.properties or self._properties_of_handle()).text(Attribute.DEVICEPROP_JSON_REPRESENTATION)

    @property
    def name(self) -> str:
        """Name of the device, such as ``NVIDIA H200``."""
        if self.handle is not None:
            return torch.cuda.get_device_name()
        return str(json.loads(self.properties_json)["deviceName"])

    def engines(self, problem: ConvProblem, n: int, *, every: bool = False) -> list[Engine]:
        """Return the engines that cuDNN offers for ``n`` samples of the problem, best first.

        every: return all supported engines (``every_engine``), with more settings, instead of those that cuDNN
        proposes. Raises ``CudnnError`` if cuDNN cannot list engines.
        """
        listed = every_engine if every else offered_engines
        if self.handle is None:
            return listed(self.library, operation_graph(self.library, problem, n), self.properties)
        graph = operation_graph(self.library, problem, n, handle=self.handle.pointer.value or 0)
        return listed(self.library, graph)

    def _properties_of_handle(self) -> Descriptor:
        assert self.handle is not None
        properties = Descriptor(self.library, DescriptorKind.DEVICEPROP)
        return properties.set(
            Attribute.DEVICEPROP_HANDLE, AttributeType.HANDLE, self.handle.pointer.value or 0
        ).finalize()


def current_device() -> Device:
    """Return the current CUDA device. Raises ``UnavailableError`` if there is no device or no cuDNN."""
    loaded = library()
    try:
        handle = Handle(loaded)
    except CudnnError as error:
        raise UnavailableError(f"no CUDA device can be used here: {error}; see nvidia-smi for its driver") from error
    return Device(loaded, handle=handle)


def described_device(description: str) -> Device:
    """Return the device described in ``devices/`` under this name (``h200``), or in a JSON file.

    The JSON file holds the device's properties in cuDNN's format.

    Raises ``InvalidInputError`` if there is no such name or valid file, or cuDNN rejects the properties;
    ``UnavailableError`` if there is no cuDNN of version 9.8 or later.
    """
    text = _described(description)
    loaded = library()
    if loaded.version < OLDEST_DESCRIBED_VERSION:
        raise UnavailableError(
            f"{loaded.path} is cuDNN {loaded.version_text}, which knows no devices but the current one; install "
            "cuDNN 9.8 or later"
        )
    properties = Descriptor(loaded, DescriptorKind.DEVICEPROP)
    try:
        properties.set_text(Attribute.DEVICEPROP_JSON_REPRESENTATION, text).finalize()
    except CudnnError as error:
        raise InvalidInputError(
            f"{description} is no device that this cuDNN accepts: {error}{_lacking(text)}"
        ) from error
    return Device(loaded, properties)


def _described(name: str) -> str:
    """Return the JSON text of the built-in description of this name, or of the file. Checks that the text is JSON."""
    path = _BUILT_IN.get(name, Path(name))
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        names = ", ".join(_BUILT_IN)
        raise InvalidInputError(
            f"{name} cannot be read as the properties of a device: {reason}; name a JSON file, or one of {names}"
        ) from error
    return text


def _lacking(text: str) -> str:
    """Return a clause for an error message that lists the properties missing in a description, as cuDNN does not."""
    given, known = json.loads(text), json.loads(_BUILT_IN["h200"].read_text(encoding="utf-8"))
    missing = [key for key in known if not isinstance(given, dict) or key not in given]
    return f"; it lacks {', '.join(missing)}" if missing else ""
