"""Cache of filters for inference: a filter as transformed by an algorithm is kept between calls.

Optimizers, ``.data``, NumPy arrays that share the memory and other processes can change a filter's bytes. Torch's
version counter misses some of these changes, so every call fingerprints all bytes of the filter
(``kernels/compiled/common/fingerprint.cpp``). A fingerprint reads the filter once, at memory speed, while preparing a
filter computes and writes several times as much. The fingerprint has 64 bits, so collisions are negligible.

Filters are cached on the CPU only: on a GPU every call would have to wait for all queued work and the fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from mucudnn.kernels.compiled.library import library, loaded_build
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.kernels.contract.out_of_memory import is_out_of_memory
from mucudnn.kernels.torch_ops.torch_convolution import Geometry
from mucudnn.running.choices import ExecutableKey, executable_of
from mucudnn.running.executable import Executable
from mucudnn.running.workspace import make_releasable, note_lack_of_memory
from mucudnn.words.errors import LibraryError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration
from mucudnn.words.units import format_bytes
from mucudnn.words.warning import say_once

_Source = tuple[int, torch.Size, tuple[int, ...], torch.dtype, int]
_Prepared = tuple[_Source, Tensor]  # source of a filter, and its prepared buffer, 1-D uint8


@dataclass(frozen=True, slots=True)
class CachedFilter:
    """A filter to cache for one forward problem, prepared by ``algorithm`` in ``prepared_bytes`` bytes.

    configurations: configurations that use the cached filter, by batch size. reason: reason for caching it, as text.
    """

    problem: ConvProblem
    algorithm: str
    prepared_bytes: int
    configurations: Mapping[int, Configuration]
    reason: str = ""

    def __str__(self) -> str:
        """Return text such as ``kept for forward 64x56x56 -> 64: winograd-4x4, 2.25 MiB; batch 8 runs gemm 2×4``."""
        largest = max(self.configurations)
        parts = [
            f"kept for {self.problem}: {self.algorithm}, {format_bytes(self.prepared_bytes)}",
            f"batch {largest} runs {self.configurations[largest]}",
            *([self.reason] if self.reason else ()),
        ]
        return "; ".join(parts)


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit hash of all bytes of a dense CPU tensor, in memory order.

    The hash is the same for any number of threads. Raises ``UnavailableError`` without compiled code.
    """
    fingerprinted: int = library().mucudnn_fingerprint(tensor.data_ptr(), tensor.nbytes, torch.get_num_threads())
    return fingerprinted


class FilterCache:
    """Prepared filters of one module, made on first use and again whenever the filter's bytes change.

    The cache is thread-safe. A copy or pickle of a cache prepares its filters anew. x_shapes: shapes (N, C, H, W) with
    a cached filter. keeps_workspace: see ``Choices``.
    """

    device_type = "cpu"

    def __init__(self, filters: Iterable[CachedFilter], keeps_workspace: bool = True) -> None:
        self.filters, self.keeps_workspace = tuple(filters), keeps_workspace
        self.x_shapes = frozenset(each.problem.x_shape(n) for each in self.filters for n in each.configurations)
        self.executables: dict[ExecutableKey, Executable | None] = {}
        self._of_problem = {each.problem: each for each in self.filters}
        self._prepared: dict[ConvProblem, _Prepared] = {}
        self._preparing = Lock()
        make_releasable(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FilterCache, (self.filters, self.keeps_workspace)

    def release(self) -> None:
        """Free the memory of all prepared filters; the next call prepares them again."""
        with self._preparing:
            self._prepared = {}

    def unlock(self) -> None:
        """Reset the cache's lock in a forked process, since another thread may have held it."""
        self._preparing = Lock()

    def executable(self, problem: ConvProblem, n: int) -> Executable | None:
        """Return a new executable for ``problem`` on ``n`` samples with a cached filter; None if none is cached."""
        cached = self._of_problem.get(problem)
        configuration = None if cached is None else cached.configurations.get(n)
        if cached is None or configuration is None:
            return None
        return Executable.of(problem, configuration, cached.algorithm, keeps_workspace=self.keeps_workspace)

    def convolve(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        epilogue: Epilogue | None = None,
    ) -> Tensor | None:
        """Return y: (N, K, P, Q), a new tensor; None if no filter is cached for this call, or if memory is short.

        x: (N, C, H, W), w: (K, C // groups, R, S), bias: (K,). Call this only if no gradient is needed and ``is_eager``
        is true. epilogue: computed on y afterwards; the result is None if no algorithm of the executable supports it.
        """
        if x.shape not in self.x_shapes or loaded_build().library is None:
            return None
        if not (w.is_contiguous() or w.is_contiguous(memory_format=torch.channels_last)):  # not dense
            return None
        executable = executable_of(self, Operation.FORWARD, x, w, bias, geometry)
        if executable is None or not (epilogue is None or executable.takes(epilogue, x)):
            return None
        try:
            _, buffer = self._prepared_from(w, executable)
            return executable.run(x, w, bias, buffer, epilogue)
        except LibraryError as error:
            say_once(f"{executable.problem}: {error}; its filter is not kept")
            return None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            note_lack_of_memory(f"no memory to keep the filter of {executable.problem}; it is not kept", x.device)
            return None

    def _prepared_from(self, w: Tensor, executable: Executable) -> _Prepared:
        source = _source_of(w)
        prepared = self._prepared.get(executable.problem)
        if prepared is None or prepared[0] != source:
            prepared = self._prepare(w, source, executable)
        return prepared

    def _prepare(self, w: Tensor, source: _Source, executable: Executable) -> _Prepared:
        """Prepare the filter w into a new buffer, since another thread may be reading the old one.

        The buffer is prepared from a copy of w, so that fingerprint and buffer match even if another thread writes to
        w.
        """
        with self._preparing:
            prepared = self._prepared.get(executable.problem)
            if prepared is not None and prepared[0] == source:  # prepared by another thread in the meantime
                return prepared
            self._prepared.pop(executable.problem, None)  # frees the old buffer unless it is in use
            copy = w.detach().clone()
            torch_format = TORCH_FORMATS[executable.problem.memory_format]
            buffer = executable.prepare(copy.contiguous(memory_format=torch_format))
            prepared = self._prepared[executable.problem] = _source_of(copy), buffer
            return prepared


def _source_of(w: Tensor) -> _Source:
    """Return a key of a prepared buffer: the filter, and the number of threads, which may affect its layout."""
    return fingerprint(w), w.shape, w.stride(), w.dtype, torch.get_num_threads()
