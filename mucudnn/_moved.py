"""Finds what pickles of version 0.1.0 name by modules that have moved since.

A pickle says in which module each of its classes lived. The old name becomes a module that asks the new one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MOVED = {
    "mucudnn.bench.networks": "mucudnn.bench.sources.networks",
    "mucudnn.choosing": "mucudnn.tuning.choose",
    "mucudnn.config": "mucudnn.words.config",
    "mucudnn.configuration": "mucudnn.words.results",
    "mucudnn.environment": "mucudnn.running.environment",
    "mucudnn.errors": "mucudnn.words.errors",
    "mucudnn.kept_filters": "mucudnn.running.filter_cache",
    "mucudnn.models": "mucudnn.optimizing.report",
    "mucudnn.nn": "mucudnn.modules.conv2d",
    "mucudnn.operators": "mucudnn.running.operators",
    "mucudnn.problem": "mucudnn.words.problem",
    "mucudnn.task": "mucudnn.words.task",
    "mucudnn.values": "mucudnn.words.values",
}
_RENAMED = {"KeptFilter": "CachedFilter", "KeptFilters": "FilterCache"}


def find_moved_modules() -> None:
    """Let imports of the old names succeed. Costs nothing until one is asked for."""
    sys.meta_path.append(_Finder())


class _Finder:
    """Finder and loader, without their base classes: to import those takes as long as all else that mucudnn needs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make the module."""

    def exec_module(self, module: ModuleType) -> None:
        def find(name: str) -> Any:
            return getattr(import_module(_MOVED[module.__name__]), _RENAMED.get(name, name))

        module.__dict__["__getattr__"] = find
