"""Finds and loads libcudnn, declares the functions that are used, and turns every status into an exception.

The library is the one that torch has loaded, since two in one process would share their parts; where torch has none,
that which ``MUCUDNN_LIBCUDNN`` names, that of the package nvidia-cudnn, or that of the system.
One ctypes call costs about a microsecond.
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

from mucudnn.words.errors import LibraryError, UnavailableError

OLDEST_VERSION = 90000
_NAME = "libcudnn.so.9"
_HOW_TO_GET = (
    "install a CUDA build of torch, which brings cuDNN, or pip install nvidia-cudnn-cu13 nvidia-cublas, or name the "
    "file in MUCUDNN_LIBCUDNN"
)
_MAPS = Path("/proc/self/maps")
# What convolutions need of cuDNN 9 beside libcudnn.so.9 itself. Without graph 9.19 aborts the process when it is asked
# for its version, without runtime_compiled it refuses every tensor, without the other two it offers no engine. It works
# without adv, cnn and ops. Later versions have more parts (9.24 tensor_ir), of which nothing is known.
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
    """Failed call of cuDNN: what was asked, cuDNN's status, and its own words. ``status`` is the number."""

    def __init__(self, what: str, status: int, name: str, text: str) -> None:
        super().__init__(f"cuDNN: {what}: {name}" + (f": {text}" if text else ""))
        self.status = status
        self.parts = (what, status, name, text)

    def __reduce__(self) -> tuple[object, ...]:
        return CudnnError, self.parts

    @property
    def is_unsupported(self) -> bool:
        """Whether this library or device does not do what was asked, rather than that something is wrong."""
        return 3000 <= self.status < 4000

    @property
    def is_lack_of_memory(self) -> bool:
        """Whether memory of the host or of the device could not be had; later it may."""
        return self.status in (4003, 4004)


class Library:
    """Loaded libcudnn; ``version`` as cuDNN counts: 91900 is 9.19.0.

    path: of the file, or its name where the system finds it. Raises ``UnavailableError`` where it cannot be loaded, is
    something else or too old, or lacks one of its parts or cuBLASLt.
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
        """Version such as ``9.19.0``; before version 9 numbers had one digit less."""
        major = 10000 if self.version >= OLDEST_VERSION else 1000
        return f"{self.version // major}.{self.version % major // 100}.{self.version % 100}"

    def call(self, name: str, what: str, *arguments: object) -> None:
        """Call a function by its name. Raises ``CudnnError`` saying ``what`` was asked, if it fails."""
        status = getattr(self._loaded, name)(*arguments)
        if status:
            text = ctypes.create_string_buffer(4096)
            self._loaded.cudnnGetLastErrorString(text, len(text))
            status_name = self._loaded.cudnnGetErrorString(status).decode()
            raise CudnnError(what, status, status_name, text.value.decode(errors="replace").strip())

    def destroy(self, name: str, pointer: ctypes.c_void_p) -> None:
        """Call the function that destroys what the pointer is of; from ``__del__``, where nobody could mend a failure.

        Nothing is done while Python ends: the process gives everything back, and a GPU's driver may have gone before.
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
    """Return this process's libcudnn, loaded on the first call. Raises ``UnavailableError`` where there is none."""
    return Library(_loaded_by_torch() or os.environ.get("MUCUDNN_LIBCUDNN") or _of_package() or _NAME)


def _loaded_by_torch() -> str | None:
    """Return the file that torch, or anybody, has mapped into this process."""
    import_module("torch")
    if not _MAPS.exists():
        return None
    paths = {line.split(maxsplit=5)[-1].strip() for line in _MAPS.read_text().splitlines() if _NAME in line}
    return min(paths, default=None)


def _of_package() -> str | None:
    """Return the file of the package nvidia-cudnn, on which CUDA builds of torch depend."""
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") is not None else None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [Path(folder) / "lib" / _NAME for folder in folders]
    return next((str(file) for file in files if file.exists()), None)


def _has_no_parts(path: str) -> bool:
    """Whether the name is that of a cuDNN before 9: its parts are others, and it tells its version without them."""
    major = re.search(r"\.so\.(\d+)", Path(path).name)
    return major is not None and int(major[1]) < 9


def _load_parts(path: str) -> None:
    """Load what cuDNN would load when it first needs it, from where it lies, or else from where the system finds it.

    Raises ``UnavailableError`` where a part is missing or cannot be loaded.
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
    """Load cuBLASLt before cuDNN does: it would abort the process where it cannot.

    path: of libcudnn, which looks for its parts at these places before it asks the system. cuda: major version.
    Raises ``UnavailableError``.
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
