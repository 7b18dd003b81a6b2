"""The history of a machine, of made-up folders: what is told follows from their samples; the command end to end."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import exp, log
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from support.clock.machine import ENVIRONMENT
from support.command_line import invoke

from mucudnn.bench.analyses.comparison import Verdict
from mucudnn.bench.analyses.history import History, read_history, slower_in_words
from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.sources import layers
from mucudnn.bench.sources.layers import TRACKED, LayerTable, read_csv
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import Operation

TOLERANCE, ROUNDS = 0.05, 41
BEGUN = datetime(2026, 11, 1, tzinfo=UTC)
HEADER = Header("network", TRACKED, {}, ENVIRONMENT, ("layer", "operation"), 2)


def samples(time_s: float, seed: int) -> list[float]:
    noise = np.random.default_rng(seed).normal(0, 0.01, ROUNDS)
    return [float(time_s * exp(one)) for one in noise]


def write_version(path: Path, day: int, ours_s: Sequence[float], header: Header = HEADER) -> None:
    """Layers a, b, ... that torch computes in 10 ms, and ours in these seconds."""
    header = replace(header, date=BEGUN + timedelta(days=day), identity=f"{day:012d}")
    with open_folder(path, header) as folder:
        for index, time_s in enumerate(ours_s):
            subject = {"layer": "abc"[index], "operation": "forward"}
            folder.add(
                [
                    Row(subject, "torch", samples(0.01, 100 * day + 2 * index)),
                    Row(subject, "mucudnn", samples(time_s, 100 * day + 2 * index + 1)),
                ]
            )
        folder.write_summary()


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Three versions, whose names are not in the order of their dates: b becomes slower in the last one."""
    write_version(tmp_path / "z-first", 1, (0.005, 0.0025))
    write_version(tmp_path / "m-second", 2, (0.005, 0.0025, 0.01))
    write_version(tmp_path / "a-third", 3, (0.005, 0.0040, 0.01))
    write_version(tmp_path / "of-another-source", 4, (0.005,), replace(HEADER, source="alexnet"))
    return tmp_path


def history_of(path: Path) -> History:
    return read_history(path, TRACKED, TOLERANCE)


def test_versions_come_in_the_order_of_their_dates_with_their_speedups(machine: Path) -> None:
    history = history_of(machine)
    assert [version.name for version in history.versions] == ["z-first", "m-second", "a-third"]
    assert history.subjects == [("a", "forward"), ("b", "forward"), ("c", "forward")]
    for version in history.versions:
        by_key = {(row["layer"], row["contestant"]): median(row["samples_s"]) for row in version.folder.lines}
        expected = {layer: by_key[layer, "torch"] / by_key[layer, "mucudnn"] for layer, _ in version.speedups}
        assert {layer: speedup.value for (layer, _), speedup in version.speedups.items()} == pytest.approx(expected)
        mean = exp(sum(map(log, expected.values())) / len(expected))
        assert version.mean.value == pytest.approx(mean)
        assert version.mean.low < mean < version.mean.high


def test_what_changed_since_the_version_before_is_told(machine: Path) -> None:
    first, second, third = history_of(machine).versions
    assert first.change is None
    assert second.change is not None
    assert not second.change.of(Verdict.SLOWER)
    assert third.change is not None
    assert [row.after["layer"] for row in third.change.of(Verdict.SLOWER)] == ["b"]
    text = slower_in_words(history_of(machine))
    assert text.startswith("slower since m-second: b forward, 1.")
    assert len(text.splitlines()) == 1


def test_what_cannot_be_read_is_told_and_the_rest_is_there(machine: Path) -> None:
    (machine / "m-second" / "environment.json").write_text('{"format_')
    with (machine / "a-third" / "rows.jsonl").open("a") as stream:
        stream.write('{"half": ')
    write_version(machine / "other-columns", 5, (0.005,), replace(HEADER, subject_columns=("layer",)))
    history = history_of(machine)
    assert [version.name for version in history.versions] == ["z-first", "a-third"]
    told = "\n".join(history.problems)
    assert "m-second" in told
    assert "rows.jsonl, line 7: incomplete" in told
    assert "other-columns has different columns" in told
    with pytest.raises(InvalidInputError, match="is not a folder"):
        history_of(machine / "nowhere")


def test_the_command_measures_once_and_shows_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tmp_path / "tiny.csv"
    tiny.write_text("name,n,c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w\nsmall,2,3,6,6,4,1,1,0,0,1,1\n")
    limits = MachineLimits(1e9, 1e9)  # measuring them takes seconds
    monkeypatch.setattr(MachineLimits, "measured", classmethod(lambda cls, device, dtype: limits))
    monkeypatch.setattr(layers, "tracked_layers", lambda: LayerTable(TRACKED, tuple(read_csv(tiny))))
    asked = ("bench", "track", tmp_path / "results", "--machine", "here", "--rounds", "1", "--threads", "1")
    for told in ("one", "was measured before"):
        result = invoke(*asked, "--as", "one")
        assert result.exit_code == 0, result.output
        assert told in result.output
    folder = tmp_path / "results" / "here"
    with (folder / "history.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["version"], row["operation"]) for row in rows] == [("one", str(each)) for each in Operation]
    before = (folder / "one" / "rows.jsonl").read_bytes()
    assert invoke(*asked, "--history", "--as", "two").exit_code == 0
    assert not (folder / "two").exists()
    assert (folder / "one" / "rows.jsonl").read_bytes() == before
    assert invoke(*asked, "--as", "a/b").exit_code == 2
