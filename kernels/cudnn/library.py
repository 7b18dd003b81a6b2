"""Loads libcudnn, declares its functions, and converts status codes to exceptions.

The libcudnn that torch has loaded is used, because two copies in one process would share their sub-libraries. If torch
has loaded none, the libcudnn named by ``MUCUDNN_LIBCUDNN``, of the package nvidia-cudnn, or of the system is loaded. A
ctypes call takes about 1 us.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from mucudnn.core.errors import LibraryError, UnavailableError

OLDEST_VERSION = 90000
_NAME = "libcudnn.so.9"
_HOW_TO_GET = (
    "install a CUDA build of torch, which brings cuDNN, or pip install nvidia-cudnn-cu13 nvidia-cublas, or name the "
    "file in MUCUDNN_LIBCUDNN"
)
_MAPS = Path("/proc/self/maps")
# The sub-libraries of cuDNN 9 that convolutions need besides libcudnn.so.9. Without graph, cuDNN 9.19 aborts the
# process in cudnnGetVersion; without runtime_compiled it refuses every tensor; without the other two it offers no
# engine. It works without adv, cnn and ops. Later versions have more (9.24 tensor_ir), whose role is unknown.
_PARTS = ("graph", "engines_runtime_compiled", "engines_precompiled", "heuristic")

_int, _int64, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, list[object]] = {
    "cudnnCreate": [ctypes.POINTER(_pointer)],
    "cudnnDestroy": [_pointer],
    "cudnnSetStream": [_pointer, _pointer],
    "cudnnBackendCreateDescriptor": [_int, ctypes.POINTER(_pointer)],
    "cudnnBackendDestroyDescriptor": [_pointer],
    "cudnnBackendFinalize": [_pointer],
    "cudnnBackendSetAttribute": [_pointer, _int, _int, _int64, _pointer],
    "cudnnBackendGetAttribute": [_pointer, _int, _int, _int64, ctypes.POINTER(_int64), _pointer],
    "cudnnBackendExecute": [_pointer, _pointer, _pointer],
}


class CudnnError(LibraryError):
    """A failed call of cuDNN, with the attempted operation, the status code (``status``), and cuDNN's message."""

    def __init__(self, action: str, status: int, name: str, text: str) -> None:
        super().__init__(f"cuDNN: {action}: {name}" + (f": {text}" if text else ""))
        self.status = status
        self.parts = (action, status, name, text)

    def __reduce__(self) -> tuple[object, ...]:
        return CudnnError, self.parts

    @property
    def is_unsupported(self) -> bool:
        """Whether the call failed because cuDNN or the device does not support the operation."""
        return 3000 <= self.status < 4000

    @property
    def is_lack_of_memory(self) -> bool:
        """Whether cuDNN could not allocate memory of the host or of the device, so that a retry may succeed."""
        return self.status in (4003, 4004)


class Library:
    """The loaded libcudnn. ``version`` is cuDNN's number, such as 91900 for 9.19.0.

    path: path of the file, or a name that the system's loader finds. Raises ``UnavailableError`` if the file cannot be
    loaded, is not cuDNN or too old, or lacks a sub-library or cuBLASLt.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._loaded = ctypes.CDLL(path)
            self._loaded.cudnnGetVersion.restype = ctypes.c_size_t
        except OSError as error:
            raise UnavailableError(f"there is no cuDNN: {error}; {_HOW_TO_GET}") from error
        except AttributeError as error:
            raise UnavailableError(f"{path} is no cuDNN: {error}; {_HOW_TO_GET}") from error
        if not _has_no_parts(path):
            _load_parts(path)
        self.version = int(self._loaded.cudnnGetVersion())
        if self.version < OLDEST_VERSION:
            raise UnavailableError(f"{path} is cuDNN {self.version_text}; mucudnn needs 9.0 or later: {_HOW_TO_GET}")
        self._declare()
        _load_cublaslt(path, int(self._loaded.cudnnGetCudartVersion()) // 1000)

    @property
    def version_text(self) -> str:
        """cuDNN's version such as ``9.19.0``, from its number, which had one digit fewer before version 9."""
        major = 10000 if self.version >= OLDEST_VERSION else 1000
        return f"{self.version // major}.{self.version % major // 100}.{self.version % 100}"

    def call(self, name: str, action: str, *arguments: object) -> None:
        """Call a cuDNN function by its name.

        Raises ``CudnnError`` if it fails; ``action`` names the operation in the message.
        """
        status = getattr(self._loaded, name)(*arguments)
        if status:
            text = ctypes.create_string_buffer(4096)
            self._loaded.cudnnGetLastErrorString(text, len(text))
            status_name = self._loaded.cudnnGetErrorString(status).decode()
            raise CudnnError(action, status, status_name, text.value.decode(errors="replace").strip())

    def destroy(self, name: str, pointer: ctypes.c_void_p) -> None:
        """Call the function that destroys a cuDNN object. Failures are ignored, because ``__del__`` calls this method.

        The method does nothing at interpreter shutdown, when the GPU driver may already have been unloaded.
        """
        if not sys.is_finalizing():
            getattr(self._loaded, name)(pointer)

    def _declare(self) -> None:
        self._loaded.cudnnGetCudartVersion.restype = ctypes.c_size_t
        self._loaded.cudnnGetErrorString.restype = ctypes.c_char_p
        self._loaded.cudnnGetLastErrorString.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._loaded.cudnnGetLastErrorString.restype = None
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._loaded, name)
            function.argtypes, function.restype = arguments, _int


@lru_cache(maxsize=1)
def library() -> Library:
    """Return this process's libcudnn, loaded on the first call. Raises ``UnavailableError`` if there is none."""
    return Library(_loaded_by_torch() or os.environ.get("MUCUDNN_LIBCUDNN") or _of_package() or _NAME)


def _loaded_by_torch() -> str | None:
    """Return the path of the libcudnn that torch or other code has loaded into this process; None if there is none."""
    import_module("torch")
    if not _MAPS.exists():
        return None
    paths = {line.split(maxsplit=5)[-1].strip() for line in _MAPS.read_text().splitlines() if _NAME in line}
    return min(paths, default=None)


def _of_package() -> str | None:
    """Return the path of libcudnn in the package nvidia-cudnn, which CUDA builds of torch install; None without it."""
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") is not None else None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [Path(folder) / "lib" / _NAME for folder in folders]
    return next((str(file) for file in files if file.exists()), None)


def _has_no_parts(path: str) -> bool:
    """Return whether the file is named like a cuDNN before 9, whose version can be read without its sub-libraries."""
    major = re.search(r"\.so\.(\d+)", Path(path).name)
    return major is not None and int(major[1]) < 9


def _load_parts(path: str) -> None:
    """Load the sub-libraries that cuDNN would load lazily, from its folder or from the system's library path.

    Raises ``UnavailableError`` if a sub-library is missing or cannot be loaded.
    """
    for part in _PARTS:
        name = f"libcudnn_{part}.so.9"
        beside = Path(path).parent / name
        file = str(beside) if os.sep in path and beside.exists() else name
        try:
            ctypes.CDLL(file)
        except OSError as error:
            raise UnavailableError(
                f"{path} lacks its part {name}: {error}; install cuDNN again as a whole, for example with "
                "pip install --force-reinstall nvidia-cudnn-cu13"
            ) from error


def _load_cublaslt(path: str, cuda: int) -> None:
    """Load cuBLASLt before cuDNN does, because cuDNN aborts the process if loading it fails.

    Raises ``UnavailableError`` if cuBLASLt cannot be loaded.

    path: path of libcudnn, whose folder is searched before the system's places.
    cuda: major version of CUDA.
    """
    name = f"libcublasLt.so.{cuda}"
    folders = (".", "../../cublas/lib", f"../../cu{cuda}/lib") if os.sep in path else ()
    for file in (*(Path(path).parent / folder / name for folder in folders), name):
        try:
            ctypes.CDLL(str(file))
        except OSError:
            continue
        return
    raise UnavailableError(
        f"{path} needs {name}, which is neither beside it nor known to the system; pip install nvidia-cublas, or add "
        "its folder to LD_LIBRARY_PATH"
    )
