"""Sizes beyond all bounds on the command line: a message and status 2, and no process that dies or fills the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import fail

COMMANDS = {
    "layers": ("layers", "FILE", "--batch"),
    "tune": ("tune", "FILE", "--batch"),
    "explain": ("explain", "FILE", "--budget", "64MiB", "--batch"),
    "batch": ("batch", "FILE", "--up-to"),
    "scale": ("scale", "alexnet", "--batch"),
    "scale up to": ("scale", "alexnet", "--up-to"),
    "share": ("share", "FILE", "--profiles", "FILE", "--batch"),
    "engines": ("engines", "FILE", "--batch"),
    "bench network": ("bench", "network", "FILE", "--batch"),
    "bench limits": ("bench", "limits", "FILE", "--batch"),
    "bench memory": ("bench", "memory", "alexnet", "--batch"),
    "bench training": ("bench", "training", "alexnet", "--batch"),
    "bench inference": ("bench", "inference", "alexnet", "--batch"),
}


@pytest.fixture
def smallest(tmp_path: Path) -> Path:
    """One number in, one number out: the batch size alone is what is too large."""
    path = tmp_path / "smallest.csv"
    path.write_text("c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w\n1,1,1,1,1,1,0,0,1,1\n")
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_batches_beyond_all_bounds(name: str, smallest: Path) -> None:
    arguments = [str(smallest) if argument == "FILE" else argument for argument in COMMANDS[name]]
    for batch in (1_048_577, 10**30):
        message = fail(*arguments, batch)
        assert str(batch) in message
        assert "at most" in message
