"""Algorithms in C++, of which x86's plain build has few."""

from __future__ import annotations

from typing import Any

import pytest

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels import registry
from mucudnn.kernels.compiled.library import why_not

_ANY_PROBLEM = ConvProblem(Operation.FORWARD, 8, 9, 9, 8, 3, 3)


def algorithm(name: str) -> Any:
    """Return the algorithm with this name; skip the test if the build in use does not have it."""
    if reason := why_not(_ANY_PROBLEM, "winograd" if "winograd" in name else name):
        pytest.skip(reason)
    return registry.algorithm(name)
