"""``mucudnn share`` through its real entry point, from exported measurements."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.command_line import TUNE, fail, invoke, one_layer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``fast.jsonl``, of a device that takes 1 ms a sample, and ``slow.jsonl``, of one that takes 3 ms."""
    path = tmp_path_factory.mktemp("share")
    database = path / "measured.sqlite"
    layers = one_layer(path)
    assert invoke("tune", layers, *TUNE, "--thorough", "--database", database).exit_code == 0
    assert invoke("database", "export", path / "measured.jsonl", "--database", database).exit_code == 0
    rows = [json.loads(line) for line in (path / "measured.jsonl").read_text(encoding="utf-8").splitlines()]
    for name, sample_s in (("fast", 1e-3), ("slow", 3e-3)):
        lines = (json.dumps(of_known_times(row, name, sample_s)) for row in rows if row["kind"] == "measurement")
        (path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return path


def of_known_times(row: Mapping[str, Any], device: str, sample_s: float) -> dict[str, Any]:
    return {**row, "setup_s": 0.0, "step_s": row["micro_batch_size"] * sample_s, "device": device}


def share(folder: Path, profiles: str, *others: object) -> dict[str, Any]:
    """The record of what is printed, too."""
    named = ",".join(str(folder / name) for name in profiles.split(","))
    out = folder / "out.json"
    result = invoke("share", folder / "layers.csv", "--batch", "64", "--profiles", named, "--json", out, *others)
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    shares = tuple(device["samples"] for device in record["devices"])
    assert f"UnevenBatchSampler(data, shares={shares})" in result.output
    return record


def samples(record: Mapping[str, Any]) -> list[int]:
    return [device["samples"] for device in record["devices"]]


def test_a_device_three_times_as_fast_takes_three_times_as_much(folder: Path) -> None:
    record = share(folder, "slow.jsonl,fast.jsonl", "--csv", folder / "out.csv")
    assert samples(record) == [16, 48]
    assert record["speedup_over_equal"] == pytest.approx(2)
    assert record["speedup_over_fastest"] == pytest.approx(4 / 3)
    with (folder / "out.csv").open(encoding="utf-8") as stream:
        lines = [*csv.DictReader(stream)]
    assert lines[0]["device"].startswith("slow")
    assert [int(line["equal_samples"]) for line in lines] == [32, 32]


def test_the_rest_of_a_step_counts(folder: Path) -> None:
    assert samples(share(folder, "slow.jsonl,fast.jsonl", "--rest", "1s,1s")) == [32, 32]


def test_times_of_the_rest_that_are_not_one_for_each_are_refused(folder: Path) -> None:
    command = ("share", folder / "layers.csv", "--profiles", folder / "fast.jsonl")
    assert "--rest has 2 times for 1 profiles" in fail(*command, "--rest", "1ms,2ms")
    assert "write a time for each profile" in fail(*command, "--rest", "none")


def test_what_is_no_profile_is_refused(folder: Path) -> None:
    named = f"{folder / 'fast.jsonl'},{folder / 'layers.csv'}"
    assert "neither a database nor a profile" in fail("share", folder / "layers.csv", "--profiles", named)


def test_a_profile_is_not_written_over(folder: Path) -> None:
    named = f"{folder / 'slow.jsonl'},{folder / 'fast.jsonl'}"
    command = ("share", folder / "layers.csv", "--profiles", named, "--json", folder / "fast.jsonl")
    assert "is also '--profiles'" in fail(*command)
