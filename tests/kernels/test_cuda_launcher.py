"""How CUDA C++ is compiled and started through CuPy: seen by a CuPy that only remembers what it is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mucudnn.core.errors import CANDIDATE_ERRORS
from mucudnn.kernels.winograd import cupy_launcher
from mucudnn.kernels.winograd.cupy_launcher import CupyLauncher, LaunchError

SOURCE = 'extern "C" __global__ void add(float* a, Sizes sizes) {}'
STREAM = SimpleNamespace(cuda_stream=77)
CACHED = (cupy_launcher._probe, cupy_launcher._module, cupy_launcher._function, cupy_launcher._stream)


class FakeCompileError(Exception):
    """Like CuPy's, no ``RuntimeError``."""


@dataclass
class FakeCupy:
    """``active``: the devices and streams that are entered; ``launched``: with what was active then."""

    failure: Exception | None = None
    active: list[object] = field(default_factory=list)
    compiled: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    launched: list[tuple[str, list[object], Any, Any, Any]] = field(default_factory=list)

    def module(self) -> ModuleType:
        module: Any = ModuleType("cupy")
        module.__version__ = "14.2.0"
        module.RawModule = self.raw_module
        module.cuda = SimpleNamespace(
            Device=lambda index: Entered(self.active, ("device", index)),
            Stream=SimpleNamespace(from_external=lambda s: Entered(self.active, ("stream", s.__cuda_stream__()))),
            compiler=SimpleNamespace(CompileException=FakeCompileError),
        )
        return module  # type: ignore[no-any-return]

    def raw_module(self, *, code: str, options: tuple[str, ...]) -> SimpleNamespace:
        self.compiled.append((code, options))
        return SimpleNamespace(get_function=self.get_function)

    def get_function(self, name: str) -> object:
        if self.failure is not None:
            raise self.failure
        return lambda *call: self.launched.append((name, list(self.active), *call))


@dataclass
class Entered:
    active: list[object]
    what: object

    def __enter__(self) -> None:
        self.active.append(self.what)

    def __exit__(self, *_: object) -> None:
        self.active.remove(self.what)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake.module())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: STREAM)
    return fake


def launch(device: int = 1) -> None:
    CupyLauncher().launch(SOURCE, "add", 3, 128, (4096, 0), (5, -1, 7), torch.device("cuda", device))


def test_functions_are_started_on_torch_s_stream_of_the_tensor_s_device(cupy: FakeCupy) -> None:
    launch()
    (name, active, grid, block, arguments), *others = cupy.launched
    assert (name, active, grid, block) == ("add", [("device", 1), ("stream", (0, 77))], (3,), (128,))
    *pointers, structure = arguments
    assert pointers == [4096, 0]
    assert isinstance(structure, np.ndarray)
    assert structure.size == 1  # CuPy passes by value what has one element
    assert structure.tobytes() == np.array([5, -1, 7], np.int32).tobytes()
    assert others == []
    assert cupy.active == []


def test_what_cannot_be_compiled_is_an_error_that_fails_a_candidate_only(cupy: FakeCupy) -> None:
    cupy.failure = FakeCompileError("line 3: expected a ;")
    with pytest.raises(LaunchError, match=r"cannot compile 'add' for cuda:1: line 3") as error:
        launch()
    assert isinstance(error.value, CANDIDATE_ERRORS)


@pytest.mark.parametrize(("cuda", "major"), [(None, 13), ("13.0", 13), ("12.8", 12)])
def test_without_cupy_the_reason_says_what_to_install_beside_this_torch(
    cuda: str | None, major: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert CupyLauncher().probe() == f"CuPy is not installed: pip install cupy-cuda{major}x"


def test_a_cupy_that_does_not_work_is_said_once(cupy: FakeCupy) -> None:
    cupy.failure = RuntimeError("\n====\nFailed to find CUDA headers.\nPlease install them")
    reason = "CuPy does not work here: RuntimeError: Failed to find CUDA headers."
    with pytest.warns(UserWarning, match="without its own CUDA functions: " + reason) as warned:
        assert CupyLauncher().probe() == CupyLauncher().probe() == reason
    assert len(warned) == 1
