"""``mucudnn scale``, also under torchrun, through its real entry point."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from support.command_line import fail, invoke
from support.places import TESTS
from support.ranks.launching import torchrun

from mucudnn.cli.shared.parameters import parse_ranks
from mucudnn.words.errors import InvalidInputError

TRAINED = ("support.models_by_name:trained", "--input", "3x9x9")
QUICK = ("--up-to", "4", "--rounds", "1", "--algorithms", "gemm", "--time-limit", "20ms", "--threads", "1")


def test_it_prints_writes_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ("--csv", tmp_path / "out.csv", "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    sizes = ("--batch", "16", "--ranks", "1,2,4,...,32", "--local-batch", "3")
    result = invoke("scale", *TRAINED, *sizes, *QUICK, "--all-reduce", "tree", "--latency", "1ms", *files)
    assert result.exit_code == 0, result.output
    for expected in (
        "strong scaling: 16 samples in all",
        "weak scaling: 3 samples a rank",
        "best bucket_cap_mb",
        "a device starves below a local batch of",
        "tree all-reduce of 34 KiB in 7 gradients, beside the backward pass; latency 1 ms, bandwidth 25 GB/s",
    ):
        assert expected in result.output
    with (tmp_path / "out.csv").open(encoding="utf-8") as stream:
        lines = [*csv.DictReader(stream)]
    shares = {(line["ranks"], line["local_batch"]) for line in lines if line["scaling"] == "strong"}
    assert shares == {("1", "16"), ("2", "8"), ("4", "4"), ("8", "2"), ("16", "1")}
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [step["local_batch"] for step in record["steps"]] == [1, 2, 4]
    assert record["link"] == {"latency_s": 1e-3, "bytes_per_s": 25e9, "is_measured": False}
    assert len(record["points"]) == len(lines) == 2 * 5 + 2 * 6
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_ranks_of_torchrun_measure_their_link_and_one_of_them_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{TESTS.parent}")
    out = tmp_path / "out.json"
    arguments = ("scale", *TRAINED, "--batch", "8", "--ranks", "1,2", *QUICK, "--measure", "--json", out)
    done = torchrun("-m", "mucudnn", *arguments, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("strong scaling") == 1
    assert "measured on the running process group" in done.stdout
    link = json.loads(out.read_text(encoding="utf-8"))["link"]
    assert link["is_measured"]
    assert link["bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--measure",), "start it with torchrun --nproc-per-node N -m mucudnn"),
        (("--measure", "--latency", "1us"), "--measure finds the latency itself"),
        (("--workspace-budget", "1MiB"), "is valid at one batch size only"),
        (("--ranks", "4,2"), "do not ascend"),
        (("--latency", "none"), "is not a latency"),
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
