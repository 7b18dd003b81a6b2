"""``mucudnn bench data-parallel`` through its real entry point, with processes of its own and under torchrun."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

import pytest
from support.command_line import fail, invoke
from support.ranks.launching import torchrun
from support.snapshots import assert_as_stored

from mucudnn.bench.results.reading import read_folder
from mucudnn.bench.results.variants import Communication
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.bench.suites.data_parallel import RanksSetting, data_parallel_tables
from mucudnn.cli.bench import data_parallel as command
from mucudnn.core.config import Config
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.records import Environment
from mucudnn.core.tables import Table

pytestmark = pytest.mark.slow

TRAINED = ("bench", "data-parallel", "support.models_by_name:trained", "--input", "3x9x9")
FEW = ("--batch", "2", "--rounds", "2", "--threads", "1")
QUICK = (*FEW, "--time-limit", "10ms")
NAMES = [(cap, which) for cap in (None, 0.01) for which in ("torch", "mucudnn")]


@pytest.fixture(autouse=True)
def few_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCUDNN_ALGORITHMS", "gemm")


def names(lines: Iterable[Mapping[str, object]]) -> list[tuple[object, object]]:
    return [(line["bucket_cap_mb"], line["contestant"]) for line in lines]


def test_the_command_starts_its_ranks_and_writes_every_row(tmp_path: Path) -> None:
    kept = "--bucket-cap-mb", "default,0.01", "--out", tmp_path / "folder"
    result = invoke(*TRAINED, *QUICK, *kept)
    assert result.exit_code == 0, result.output
    folder = read_folder(tmp_path / "folder")
    assert names(folder.lines) == NAMES
    assert invoke(*TRAINED, *QUICK, *kept).stdout == result.stdout
    assert read_folder(tmp_path / "folder").lines == folder.lines  # nothing was measured again
    assert "2 ranks of 2 samples, allreduce: data-parallel steps" in result.output
    assert "2 ranks, 1 thread each" in result.output
    for line in folder.lines:
        assert (len(line["samples_s"]), line["ranks"], line["batch_size"]) == (2, 2, 2)
        assert (line["compared"], line["equal"]) == (3, 3)
        assert line["exposed_s"] == pytest.approx(median(line["samples_s"]) - line["alone_s"])
        assert min(line[name] for name in ("forward_convolutions_s", "backward_convolutions_s", "rest_s")) > 0


def test_ranks_of_torchrun_measure_and_one_of_them_tells(tmp_path: Path) -> None:
    done = torchrun(
        *("-m", "mucudnn", *TRAINED, *QUICK, "--communication", "post-local-sgd", "--out", tmp_path / "out"), ranks=2
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("data-parallel steps") == 1
    assert "average the parameters of all ranks, one in 4" in done.stdout
    assert names(read_folder(tmp_path / "out").lines) == NAMES[:2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "0"), "'--ranks'"),
        (("--period", "1"), "'--period'"),
        (("--communication", "ring"), "allowed are allreduce, fp16, bf16, powersgd, post-local-sgd, hierarchical-sgd"),
        (("--communication", "bf16"), "PyTorch sends bf16 between GPUs only"),
        (("--communication", "post-local-sgd", "--memory-format", "channels-last"), "leaves parameters contiguous"),
        (("--bucket-cap-mb", "1,x"), "'x' is not a bucket size in MiB"),
        (("--bucket-cap-mb", "0"), "'0' is not a bucket size in MiB"),
        (("--bucket-cap-mb", "nan"), "'nan' is not a bucket size"),
        (("--device", "cuda:1"), "'cuda:1' is not one of 'cpu', 'cuda'"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in fail(*TRAINED, *QUICK, *arguments)


# Told


def rows(equal: int = 10, communication: Communication = Communication.ALLREDUCE) -> tuple[RanksSetting, list[Row]]:
    setting = RanksSetting(
        *("resnet18", 2, 16, "cpu", "float32", MemoryFormat.CONTIGUOUS, communication, 4), bucket_caps=(None, 100.0)
    )
    found = [
        Row(
            setting.subject(cap),
            which,
            (0.99 * step_s, step_s, 1.01 * step_s),
            more={
                **{"alone_s": 0.6, "exposed_s": exposed_s, "bucket_bytes": [2**20] * buckets, "rest_s": 0.15},
                **{"forward_convolutions_s": forward_s, "backward_convolutions_s": 0.3, "compared": 10, "equal": same},
                **{"collective_bytes": 2**20 * buckets},
            },
        )
        for cap, which, step_s, exposed_s, buckets, forward_s, same in (
            (None, "torch", 1.0, 0.05, 2, 0.5, 10),
            (None, "mucudnn", 0.64, 0.04, 2, 0.15, equal),
            (100.0, "torch", 1.2, 0.25, 1, 0.5, 10),
            (100.0, "mucudnn", 0.8, 0.2, 1, 0.15, 10),
        )
    ]
    return setting, found


def told(tmp_path: Path, setting: RanksSetting, found: list[Row]) -> list[Table | str]:
    environment = Environment("a processor", "AVX512", 1, "2.13.0+cpu", "oneDNN 3.12.0", "avx512")
    with open_folder(tmp_path, setting.header(Config(), 3, environment)) as folder:
        folder.add(found)
        folder.write_summary()
    return [*data_parallel_tables(read_folder(tmp_path))]


def test_the_table_compares_with_torch_of_the_same_buckets(tmp_path: Path) -> None:
    assert_as_stored("bench-data-parallel", *told(tmp_path, *rows()))


def test_ranks_that_are_not_equal_fail_the_command_once_all_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "on_every_rank", lambda *given: rows(equal=9)[1])
    result = invoke(*TRAINED, *QUICK, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "9 of 10" in result.stdout
    assert "parameters of the ranks were not equal" in result.stderr
    assert [line["equal"] for line in read_folder(tmp_path / "out").lines] == [10, 9, 10, 10]
