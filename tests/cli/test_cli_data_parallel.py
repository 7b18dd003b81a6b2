"""``mucudnn bench data-parallel`` through its real entry point, with processes of its own and under torchrun."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.command_line import fail, invoke, one_layer
from support.ranks.launching import torchrun
from support.snapshots import assert_as_stored

from mucudnn.bench.contests.step_split import StepSplit
from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.scaling.local_batches import Convolutions
from mucudnn.bench.suites.data_parallel.report import data_parallel_rows, data_parallel_table, in_words
from mucudnn.bench.suites.data_parallel.result import DataParallelResult, Equality, Setting, StepTimes
from mucudnn.cli.bench import data_parallel as command
from mucudnn.cli.bench.data_parallel import parse_caps
from mucudnn.running.environment import Environment
from mucudnn.words.communication import Communication
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MemoryFormat

TRAINED = ("bench", "data-parallel", "support.models_by_name:trained", "--input", "3x9x9")
QUICK = (
    "--batch",
    "2",
    "--rounds",
    "2",
    "--algorithms",
    "gemm",
    "--time-limit",
    "10ms",
    "--threads",
    "1",
    "--no-confirm",
)
NAMES = [(cap, which) for cap in (None, 0.01) for which in ("torch", "mucudnn")]


def names(rows: Sequence[dict[str, object]]) -> list[tuple[object, object]]:
    return [(row["bucket_cap_mb"], row["convolutions"]) for row in rows]


def test_the_command_starts_its_ranks_and_writes_every_row(tmp_path: Path) -> None:
    files = "--csv", tmp_path / "out.csv", "--json", tmp_path / "out.json"
    kept = "--bucket-cap-mb", "default,0.01", "--out", tmp_path / "folder"
    result = invoke(*TRAINED, *QUICK, *kept, *files)
    assert result.exit_code == 0, result.output
    rows = read_folder(tmp_path / "folder").lines
    assert names([{**row, "convolutions": row["contestant"]} for row in rows]) == NAMES
    assert all(len(row["samples_s"]) == 2 for row in rows)
    assert "has it all, and nothing was measured" in invoke(*TRAINED, *QUICK, *kept).output
    assert "2 ranks of 2 samples, allreduce: data-parallel steps" in result.output
    assert "2 ranks, 1 thread each" in result.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert {"date", "environment", "config", "mucudnn", "format_version"} <= record.keys()
    assert (record["rounds"], record["threads"]) == (2, 1)
    assert names(record["steps"]) == NAMES
    with (tmp_path / "out.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    for line, row in zip(lines, record["steps"], strict=True):
        sizes = row.pop("bucket_bytes")
        assert line == {name: "" if value is None else str(value) for name, value in row.items()}
        assert len(sizes) == row["buckets"]
        assert (row["ranks"], row["batch_size"], row["compared"], row["equal"]) == (2, 2, 3, 3)
        assert row["samples_per_s"] == pytest.approx(4 / row["step_s"])
        assert row["exposed_s"] == pytest.approx(row["step_s"] - row["alone_s"])
        assert min(row[name] for name in ("forward_convolutions_s", "backward_convolutions_s", "other_s")) > 0


def test_ranks_of_torchrun_measure_and_one_of_them_tells(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = torchrun(*("-m", "mucudnn", *TRAINED, *QUICK, "--communication", "post-local-sgd", "--json", out), ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("data-parallel steps") == 1
    assert "average the parameters of all ranks, one in 4" in done.stdout
    assert names(json.loads(out.read_text())["steps"]) == NAMES[:2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "0"), "'--ranks'"),
        (("--period", "1"), "'--period'"),
        (("--communication", "ring"), "allowed are allreduce, fp16, bf16, powersgd, post-local-sgd, hierarchical-sgd"),
        (("--communication", "bf16"), "torch sends bf16 between GPUs only"),
        (("--communication", "post-local-sgd", "--memory-format", "channels-last"), "leaves parameters contiguous"),
        (("--bucket-cap-mb", "1,x"), "'x' in '1,x' is no size of buckets in MiB"),
        (("--bucket-cap-mb", "0"), "'0' in '0' is no size of buckets in MiB"),
        (("--bucket-cap-mb", "nan"), "'nan' in 'nan' is no size"),
        (("--device", "cuda:1"), "'cuda:1' is not one of 'cpu', 'cuda'"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in fail(*TRAINED, *QUICK, *arguments)


def test_a_source_without_a_model_is_refused_once(tmp_path: Path) -> None:
    said = fail("bench", "data-parallel", one_layer(tmp_path), *QUICK)
    assert said.count("has no model to run") == 1


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.running.environment.require_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "2 ranks need as many GPUs, and there are 1" in fail(*TRAINED, *QUICK, "--device", "cuda")


def test_torchrun_says_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "torchrun has started 2 ranks, not 3" in fail(*TRAINED, *QUICK, "--ranks", "3")


def test_sizes_of_buckets_are_read_once_each() -> None:
    assert parse_caps("25,default,0.5,25") == (25, None, 0.5)
    with pytest.raises(InvalidInputError, match="write for example default,1,5,25"):
        parse_caps("")


# Told


def a_result(equal: int = 10, communication: Communication = Communication.ALLREDUCE) -> DataParallelResult:
    setting = Setting("resnet18", 2, 16, "cpu", "float32", MemoryFormat.CONTIGUOUS, communication, 4)
    environment = Environment("a processor", "AVX512", 1, "2.13.0+cpu", "oneDNN 3.12.0", "avx512")
    torchs, ours = StepSplit(0.3, 0.5, 0.15), StepSplit(0.15, 0.3, 0.15)
    every = Equality(10, 10)
    return DataParallelResult(
        setting,
        Config(),
        environment,
        threads=1,
        rounds=9,
        steps=(
            StepTimes(Convolutions.TORCH, None, 1.0, 0.01, 0.95, torchs, (2**20, 2**24), every),
            StepTimes(Convolutions.MUCUDNN, None, 0.64, 0.02, 0.6, ours, (2**20, 2**24), Equality(10, equal)),
            StepTimes(Convolutions.TORCH, 100.0, 1.2, 0.01, 0.95, torchs, (2**25,), every),
            StepTimes(Convolutions.MUCUDNN, 100.0, 0.8, 0.02, 0.6, ours, (2**25,), every),
        ),
    )


def test_the_table_compares_with_torch_of_the_same_buckets() -> None:
    result = a_result()
    assert_as_stored("bench-data-parallel", data_parallel_table(result), in_words(result))
    assert [row["speedup"] for row in data_parallel_rows(result)] == [1, 1 / 0.64, 1, 1.2 / 0.8]


def test_a_period_is_told_where_there_is_one() -> None:
    assert {row["period"] for row in data_parallel_rows(a_result())} == {None}
    averaged = a_result(communication=Communication.HIERARCHICAL_SGD)
    assert {row["period"] for row in data_parallel_rows(averaged)} == {4}
    assert "one in 4" in in_words(averaged)


def test_ranks_that_are_not_equal_fail_the_command_once_all_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "on_every_rank", lambda *given: a_result(equal=9))
    result = invoke(*TRAINED, *QUICK, "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert "9 of 10" in result.stdout
    assert "parameters of the ranks were not equal" in result.stderr
    assert [step["equal"] for step in json.loads((tmp_path / "out.json").read_text())["steps"]] == [10, 9, 10, 10]
