"""Where child processes import a model from: its folder first, but nothing of the current one for our own networks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mucudnn.bench.sources.models import importable


def test_the_folder_of_a_users_model_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = [*sys.path]
    for source, first in {
        "package.models:make": tmp_path,
        f"{tmp_path / 'in'}/models.py:make": tmp_path / "in",
    }.items():
        with importable(source):
            assert sys.path == [str(first), *before]
    with importable("resnet18"):  # the current folder may be a clone of mucudnn that is not compiled
        assert sys.path == before
    assert sys.path == before
