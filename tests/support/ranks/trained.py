"""Starts ranks that train torch's model and ours, and says what must hold for what they found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.ranks.launching import script, torchrun

from mucudnn.words.problem import Operation

ALL = sorted(Operation)

Found = Sequence[Mapping[str, Any]]  # by rank


def trained(folder: Path, device: str, ranks: int, names: Sequence[str]) -> Found:
    """What ranks find that train in the ways of these names, one after the other in the same processes."""
    done = torchrun(script("train_both"), folder, device, *names, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def of(found: Found, name: str) -> Found:
    """What one of the ways has come to, by rank."""
    for one in found:
        assert "error" not in one[name], one[name]["error"]
    return [one[name] for one in found]


def assert_torchs(found: Found, way: str, how: str) -> None:
    """Ours have run, and trained as torch's. how: ``optimize`` or ``enable``."""
    for one in of(found, way):
        assert one[how]["ran"] == ALL, "torch's own ran in place of ours"
        assert one[how]["equal"], "the ranks' parameters have parted"
        assert one[how]["difference"] < 1e-12


def assert_as_near_to_float64_as_torch(found: Found) -> None:
    for one in of(found, "autocast"):
        assert one["ran"] == ALL
        assert one["equal"]
        assert 0 < one["ours"] < 1.5 * one["torchs"]


def assert_tuned_together(found: Found) -> None:
    """Each rank measured problems of its own, and all choose alike."""
    choices, *others = (one["choices"] for one in of(found, "shared"))
    assert others == [choices] * len(others)
    measured = [one["measured"] for one in of(found, "shared")]
    assert sum(measured) == len(choices)
    assert min(measured) > 0
