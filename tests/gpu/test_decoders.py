"""The decoders that ``make gpu`` measures, on the CPU with small models: what their rows say, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda import decoders
from torch import nn

from mucudnn.bench.results.reading import read_folder
from mucudnn.bench.sources.networks import large_images, video
from mucudnn.measuring.turns import Rounds

CONTESTANTS = {
    "limit": ["torch", "torch-benchmark", "mucudnn"],
    "bands": ["torch", "mucudnn-bands", "tiles", "mucudnn-graph"],
    "clip": ["torch", "torch-benchmark", "mucudnn-slices"],
}


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(4, 16, 3, padding=1), nn.SiLU(), nn.Upsample(scale_factor=8.0)),
            *(nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)),
        )


class Clip(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(video._Causal(16, 8, 3), nn.SiLU(), video._Causal(8, 3, 3))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, database: Path) -> None:
    monkeypatch.setattr(large_images, "VAEDecoder", Images)
    monkeypatch.setattr(decoders, "QwenImageDecoder", Clip)
    monkeypatch.setattr(decoders, "ROUNDS", Rounds(2, 2))
    tuning = {"confirm": False, "time_limit": "10ms", "algorithms": ("gemm", "implicit-gemm")}
    monkeypatch.setattr(decoders, "TUNING", tuning)


def rows_of(part: str, out: Path) -> dict[str, dict[str, Any]]:
    decoders.main([part, "--device", "cpu", "--side", "16", "--out", str(out)])
    folder = read_folder(out)
    assert folder.problems == ()
    return {row["contestant"]: row for row in folder.lines}


@pytest.mark.parametrize("part", CONTESTANTS)
def test_every_contestant_has_a_row(part: str, tmp_path: Path) -> None:
    rows = rows_of(part, tmp_path / "out")
    assert list(rows) == CONTESTANTS[part]
    for name, row in rows.items():
        assert row["failure"] is None
        assert len(row["samples_s"]) == 2
        assert row["turns"] == len(rows) + 1
        assert row["first_s"] > 0
        assert name == "tiles" or row["relative_difference"] < 1e-5
    assert {name for name, row in rows.items() if row["is_graph"]} <= {"mucudnn-bands", "mucudnn-slices"}
    if part == "bands":
        assert 0 < rows["mucudnn-bands"]["peak_bytes"] <= rows["torch"]["peak_bytes"] / 4
        assert rows["tiles"]["relative_difference"] > 1e-3, "seams"


def test_a_contestant_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: decoders.Call) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decoders, "with_benchmark", fail)
    rows = rows_of("limit", tmp_path / "out")
    assert rows["torch-benchmark"]["failure"] == "CUDA out of memory"
    assert len(rows["mucudnn"]["samples_s"]) == 2


def test_rows_are_written_before_the_next_contestant_gets_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(call: decoders.Call) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(decoders, "with_benchmark", stop)
    with pytest.raises(KeyboardInterrupt):
        rows_of("clip", tmp_path / "out")
    (row,) = read_folder(tmp_path / "out").lines
    assert (row["contestant"], len(row["samples_s"])) == ("torch", 1)
