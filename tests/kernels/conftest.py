"""The suite of the contract in less time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from support.effort import IS_FULL

from mucudnn.core.problem import ConvProblem, MemoryFormat
from mucudnn.testing import contract


@pytest.fixture
def in_one_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each geometry in one format, and of the thorough checks each dtype: the next one in the other; in fuzz all."""
    every = contract._cases

    def some(own: Iterable[ConvProblem]) -> Iterator[tuple[ConvProblem, int, int, bool]]:
        for number, case in enumerate(every(own)):
            problem, _, _, is_thorough = case
            is_first = problem.dtype in ("float32", "float16") if is_thorough else number // 2 % 2 == 0
            if IS_FULL or is_first is (problem.memory_format is MemoryFormat.CONTIGUOUS):
                yield case

    monkeypatch.setattr(contract, "_cases", some)
