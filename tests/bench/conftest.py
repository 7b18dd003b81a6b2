"""A machine whose costs are known, for the benchmarks of convolutions and for recipes; processes that start at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clock.known_machine import MadeUpMachine
from support.processes import forking

from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.suites.shared.processes import Worker


@pytest.fixture
def made_up_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUpMachine:
    """Its limits are known, too: measuring those of this one takes seconds."""
    monkeypatch.setattr(MachineLimits, "measured", lambda device, dtype: MachineLimits(200e3, 25e9))
    return MadeUpMachine(tmp_path / "folder")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants' processes are forked off one that has loaded torch; their environment is that of the first test."""
    monkeypatch.setattr(Worker, "_context", forking())
