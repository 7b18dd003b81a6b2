"""Backend descriptors: made, given attributes, finalized, read, destroyed; what they refer to lives as long."""

from __future__ import annotations

import ctypes
from typing import Any, NoReturn, Self

from mucudnn.kernels.cudnn.constants import Attribute, AttributeType, DescriptorKind
from mucudnn.kernels.cudnn.library import Library

_C_TYPES: dict[AttributeType, Any] = {
    AttributeType.HANDLE: ctypes.c_void_p,
    AttributeType.INT64: ctypes.c_int64,
    AttributeType.FLOAT: ctypes.c_float,
    AttributeType.DOUBLE: ctypes.c_double,
    AttributeType.BOOLEAN: ctypes.c_bool,
    AttributeType.VOID_PTR: ctypes.c_void_p,
    AttributeType.CHAR: ctypes.c_char,
}  # all others are enumerations: int


class Descriptor:
    """One descriptor of cuDNN, destroyed with this object. Every method raises ``CudnnError`` where cuDNN refuses."""

    def __init__(self, library: Library, kind: DescriptorKind) -> None:
        self.library, self.kind = library, kind
        self.pointer = ctypes.c_void_p()
        self._kept: list[Descriptor] = []
        library.call("cudnnBackendCreateDescriptor", f"make {kind.name}", kind, ctypes.byref(self.pointer))

    def __del__(self) -> None:
        if self.pointer:  # null where cuDNN made none
            self.library.destroy("cudnnBackendDestroyDescriptor", self.pointer)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a descriptor of cuDNN cannot be copied: each is destroyed once")

    def set(self, attribute: Attribute, kind: AttributeType, *values: float) -> Self:
        """Set one or more numbers."""
        return self._set(attribute, kind, len(values), (_C_TYPES.get(kind, ctypes.c_int) * len(values))(*values))

    def set_text(self, attribute: Attribute, text: str) -> Self:
        encoded = text.encode()
        return self._set(attribute, AttributeType.CHAR, len(encoded), ctypes.create_string_buffer(encoded))

    def refer(self, attribute: Attribute, *others: Descriptor) -> Self:
        """Refer to other descriptors, which live as long as this one."""
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
        """Return as many as there are, at most ``most``."""
        values = (_C_TYPES.get(kind, ctypes.c_int) * most)()
        return tuple(values[: self._get(attribute, kind, most, values)])

    def text(self, attribute: Attribute) -> str:
        values = ctypes.create_string_buffer(self.count(attribute, AttributeType.CHAR))
        self._get(attribute, AttributeType.CHAR, len(values), values)
        return values.value.decode()

    def count(self, attribute: Attribute, kind: AttributeType) -> int:
        """Return how many values there are."""
        return self._get(attribute, kind, 0, None)

    def descriptors(self, attribute: Attribute, kind: DescriptorKind, most: int) -> list[Descriptor]:
        """Return as many as there are, at most ``most``. They are copies: they do not need this one."""
        found = [Descriptor(self.library, kind) for _ in range(most)]
        pointers = (ctypes.c_void_p * most)(*(descriptor.pointer.value for descriptor in found))
        return found[: self._get(attribute, AttributeType.BACKEND_DESCRIPTOR, most, pointers)]

    def _set(self, attribute: Attribute, kind: AttributeType, count: int, values: ctypes.Array[Any]) -> Self:
        what = f"set {attribute.name}"
        pointer = ctypes.cast(values, ctypes.c_void_p)
        self.library.call("cudnnBackendSetAttribute", what, self.pointer, attribute, kind, count, pointer)
        return self

    def _get(self, attribute: Attribute, kind: AttributeType, most: int, values: ctypes.Array[Any] | None) -> int:
        """Fill in at most so many, and return how many there are."""
        what, found = f"get {attribute.name}", ctypes.c_int64()
        pointer = None if values is None else ctypes.cast(values, ctypes.c_void_p)
        arguments = (self.pointer, attribute, kind, most, ctypes.byref(found), pointer)
        self.library.call("cudnnBackendGetAttribute", what, *arguments)
        return found.value
