"""What tests of graphs get: the schedules that have run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from mucudnn.graph.schedule import Schedule


@pytest.fixture
def runs() -> Iterator[list[Schedule]]:
    """The schedules that have run."""
    schedules: list[Schedule] = []
    run = Schedule.run

    def spy(self: Schedule, arguments: tuple[Any, ...]) -> Any:
        schedules.append(self)
        return run(self, arguments)

    with mock.patch.object(Schedule, "run", spy):
        yield schedules
