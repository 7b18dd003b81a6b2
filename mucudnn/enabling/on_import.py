"""``enable`` for unchanged programs: it is called when the program imports torch."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mucudnn.core.config import Config
from mucudnn.core.errors import MucudnnError, warn


def enable_with_torch(make_config: Callable[[], Config]) -> None:
    """Call ``enable`` as soon as torch is imported: now, or when the program imports it.

    Until then torch is not loaded, so the program may still set the environment that torch reads. If ``enable`` raises
    an error of mucudnn, the program runs with torch's convolutions, with a warning.
    """
    if "torch" in sys.modules:
        _enable(make_config)
    else:
        sys.meta_path.insert(0, _OnImport(lambda: _enable(make_config)))


def not_with_torch() -> None:
    """Undo ``enable_with_torch`` before torch is imported, in this process and the processes that it starts."""
    os.environ["MUCUDNN_ENABLE"] = "0"
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _OnImport)]


def _enable(make_config: Callable[[], Config]) -> None:
    with _without_collections():
        from mucudnn.enabling.switch import enable  # loads torch

    try:
        enable(make_config())
    except MucudnnError as error:
        warn(f"mucudnn is not enabled: {error}", RuntimeWarning)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage in the block: an import makes none, and torch has a million objects to search."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _OnImport(MetaPathFinder):
    """Import finder for torch that calls a function once torch is loaded, and removes itself."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_then(module: ModuleType) -> None:
                execute(module)
                self.then()

            loader.exec_module = execute_then
        return spec
