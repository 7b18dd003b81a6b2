"""What every test gets: a fixed seed, one thread and a database of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mucudnn.execution import Recipe


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20181001)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One thread, for speed on small shapes; a test that wants more sets the number, and it is set back."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for measurements, so that no test sees the user's."""
    path = tmp_path / "measurements.sqlite"
    monkeypatch.setenv("MUCUDNN_DATABASE", str(path))
    return path


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Every preparation of a filter that is kept, as they come."""
    prepare, seen = Recipe.prepare, []

    def recorded(recipe: Recipe, w: Tensor) -> Tensor:
        seen.append(recipe)
        return prepare(recipe, w)

    monkeypatch.setattr(Recipe, "prepare", recorded)
    return seen
