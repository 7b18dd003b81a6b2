"""``mucudnn scale``, through its real entry point."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.command_line import fail, invoke

from mucudnn.cli.shared.parameters import parse_ranks
from mucudnn.core.errors import InvalidInputError

TRAINED = ("support.models_by_name:trained", "--input", "3x9x9")
QUICK = ("--up-to", "4", "--rounds", "1", "--time-limit", "20ms", "--threads", "1")


def test_it_prints_and_writes(tmp_path: Path) -> None:
    sizes = ("--batch", "16", "--ranks", "1,2,4,...,32", "--csv", tmp_path / "out.csv")
    result = invoke("scale", *TRAINED, *sizes, *QUICK, "--all-reduce", "tree", "--latency", "1ms")
    assert result.exit_code == 0, result.output
    for expected in ("16 samples in all or 4 a rank", "below a local batch of: PyTorch ", "34 KiB in 7 gradients"):
        assert expected in result.output
    with (tmp_path / "out.csv").open(encoding="utf-8") as stream:
        lines = [*csv.DictReader(stream)]
    shares = {(line["ranks"], line["local_batch"]) for line in lines if line["scaling"] == "strong"}
    assert shares == {("1", "16"), ("2", "8"), ("4", "4"), ("8", "2"), ("16", "1")}
    assert len(lines) == 2 * 5 + 2 * 6


LEARNERS = ("--local-batch", "2,4", "--rounds", "2", "--time-limit", "10ms", "--threads", "1")


@pytest.mark.slow
def test_learners_are_measured_in_place_of_a_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCUDNN_ALGORITHMS", "gemm")
    result = invoke("scale", *TRAINED, *LEARNERS, "--learners", "1", "--csv", tmp_path / "out.csv")
    assert result.exit_code == 0, result.output
    assert "the knee, the fewest learners within 5% of the best images/s: 2 samples: PyTorch 1, mucudnn 1" in (
        result.output
    )
    with (tmp_path / "out.csv").open(encoding="utf-8") as stream:
        lines = [*csv.DictReader(stream)]
    assert [(line["learners"], line["threads"], line["local_batch"], line["convolutions"]) for line in lines] == [
        ("1", "1", n, convolutions) for n in ("2", "4") for convolutions in ("torch", "mucudnn")
    ]
    assert all(float(line["images_per_s"]) > 0 and float(line["gain"]) == 1 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--learners", "2,1"), "do not ascend"),
        (("--learners", "2"), "2 learners need a thread and a CPU each, and there are 1"),
        (("--learners", "1", "--all-reduce", "tree"), "--all-reduce is of the prediction"),
    ],
)
def test_what_no_learners_can_be_is_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in fail("scale", *TRAINED, *LEARNERS, *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "4,2"), "do not ascend"),
        (("--latency", "none"), "latency_s is None; it must be a finite number"),
        (("--bandwidth", "25GB"), "write for example 25GB/s"),
    ],
)
def test_what_makes_no_prediction_is_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in fail("scale", *TRAINED, *QUICK, *arguments)


def test_ranks_go_on_by_the_last_factor() -> None:
    for text, ranks in {
        "1": (1,),
        "1,2,4,...,4096": tuple(2**i for i in range(13)),
        "1, 3, ..., 27": (1, 3, 9, 27),
        "2,4,...,8": (2, 4, 8),
        "5,6,100": (5, 6, 100),
    }.items():
        assert parse_ranks(text) == ranks
    for text in ("", "0", "1,2,...,7", "1,...,4", "...", "2,3,...,9", "1,1", "1,2,...", "1,2,...,4,8", "a"):
        with pytest.raises(InvalidInputError, match="write"):
            parse_ranks(text)
