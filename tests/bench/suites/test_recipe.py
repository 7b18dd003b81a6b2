"""Recipes: what is read, which runs they mean, how results are judged, and what is said of a faulty file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.clock.machine import ENVIRONMENT
from support.command_line import fail, invoke, one_layer

from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.results.reading import Header, ResultFolder, read_folder
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.bench.suites.recipe import SHIPPED, _criterion, judge, read_recipe
from mucudnn.core.errors import InvalidInputError

FIXED = '[fixed]\ncommand = "bench convolutions"\nsource = "alexnet"\n'
ACCEPTABLE = "[acceptable]\nfaster = { at-least = 1.0 }\n"


def written(folder: Path, *parts: str) -> Path:
    path = folder / "mine.toml"
    path.write_text("".join(parts))
    return path


def test_each_combination_of_listed_values_is_a_run(tmp_path: Path) -> None:
    mutable = '[mutable]\nbatch = [4, 8]\npolicy = "all,undivided"\nthreads = [1]\ndtype = ["float32", "a/b"]\n'
    runs = read_recipe(written(tmp_path, FIXED, mutable, ACCEPTABLE)).runs
    assert [*runs] == ["4-float32", "4-a-b", "8-float32", "8-a-b"]
    assert runs["4-a-b"] == {"source": "alexnet", "batch": 4, "policy": "all,undivided", "threads": 1, "dtype": "a/b"}
    assert [*read_recipe(written(tmp_path, FIXED, ACCEPTABLE)).runs] == ["results"]


def test_the_section_of_the_device_replaces_key_by_key(tmp_path: Path) -> None:
    own = "[cpu.fixed]\nbatch = 2\n[cpu.acceptable]\nfaster = { at-least = 0.5 }\n"
    path = written(tmp_path, FIXED, "batch = 256\nrounds = 15\n", ACCEPTABLE, "error = { at-most = 1 }\n", own)
    on_cpu, on_cuda = read_recipe(path), read_recipe(path, "cuda")
    assert [one.runs["results"]["batch"] for one in (on_cpu, on_cuda)] == [2, 256]
    assert {one.runs["results"]["rounds"] for one in (on_cpu, on_cuda)} == {15}
    assert [one.limit for one in on_cpu.criteria] == [0.5, 1]
    assert [one.limit for one in on_cuda.criteria] == [1, 1]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("[fixed\n",), "is not a TOML file: "),
        (('titel = "x"\n', FIXED), "titel is not known; did you mean title? allowed: title, takes"),
        ((FIXED, "[cpu.fxed]\n"), "[cpu] fxed is not known; did you mean fixed?"),
        (("fixed = 1\n",), "fixed is 1; it must be a section, [fixed]"),
        (("[fixed]\nbatch = 3\n",), '[fixed] needs a command, such as command = "bench convolutions"'),
        ((FIXED, "batch = [3]\n", ACCEPTABLE), "[fixed] batch is [3]; it must be one value, and not in [mutable]"),
        ((FIXED, "batch = 3\n[mutable]\nbatch = [4]\n", ACCEPTABLE), "[fixed] batch is 3; it must be one value"),
        ((FIXED,), "[acceptable] has no criterion"),
        ((FIXED, "[acceptable]\nerror = 3\n"), "[acceptable] error is 3; write { at-least = ... } or at-most"),
        ((FIXED, "[acceptable]\nerror = { at-most = 1, at-least = 1 }\n"), "[acceptable] error is "),
        (
            (FIXED, "[acceptable]\nerror = { at-most = 1, vlue = 'x' }\n"),
            "error: vlue is not known; did you mean value?",
        ),
        ((FIXED, "[acceptable]\nerror = { at-most = 'none' }\n"), "error is 'none'; it must be a number, a size"),
    ],
)
def test_a_fault_is_told(parts: Sequence[str], said: str, tmp_path: Path) -> None:
    path = written(tmp_path, *parts)
    with pytest.raises(InvalidInputError) as raised:
        read_recipe(path)
    assert str(raised.value).startswith(str(path))
    assert said in str(raised.value)


# Judged


def folder(out: Path, *turns: Sequence[Mapping[str, Any]], dtypes: Sequence[str] = ("float32",)) -> ResultFolder:
    """A result folder with rows that took turns, the same in each dtype."""
    with open_folder(out, Header("convolutions", "net", {}, ENVIRONMENT, ("layer", "dtype"), len(turns))) as writer:
        for number, rows in enumerate(turns):
            writer.add([Row({"layer": f"layer {number}", "dtype": one}, **row) for one in dtypes for row in rows])
        writer.write_summary()
    return read_folder(out)


def row(contestant: str, samples: Sequence[float], **more: Any) -> dict[str, Any]:
    return {"contestant": contestant, "samples_s": samples, **more}


def judged(value: dict[str, Any], *folders: ResultFolder) -> tuple[str, bool]:
    return judge(_criterion("one", value), {one.path.name: one for one in folders})


def test_a_speedup_is_the_geometric_mean_and_the_worst_folder_counts(tmp_path: Path) -> None:
    first = folder(tmp_path / "a", [row("torch", [8.0] * 3), row("mucudnn", [1.0] * 3)])
    turns = ([row("torch", [2.0] * 3), row("mucudnn", [1.0] * 3)], [row("torch", [1.0] * 3), row("mucudnn", [2.0] * 3)])
    second = folder(tmp_path / "b", *turns)
    assert judged({"at-least": 1.0}, first, second) == ("1, 1 to 1 (b, float32)", True)
    assert judged({"at-least": 2.0}, first, second) == ("1, 1 to 1 (b, float32)", False)


def test_a_speedup_is_not_met_only_where_its_samples_surely_say_so(tmp_path: Path) -> None:
    ours = [1.0, 1.5, 1.0, 1.5, 1.0, 1.5, 1.0, 1.5, 1.2]
    noisy = folder(tmp_path / "noisy", [row("torch", [1.2] * 9), row("mucudnn", ours)])
    for at_least, passed in ((0.9, True), (1.1, True), (1.6, False)):
        assert judged({"at-least": at_least}, noisy)[1] is passed


def test_a_rival_has_the_same_limit_and_what_failed_is_none(tmp_path: Path) -> None:
    rows = (
        *(row("undivided", [2.0], limit_bytes=2), row("mucudnn", [1.0], limit_bytes=2)),
        *(row("undivided", [], limit_bytes=1, failure="nothing fits"), row("mucudnn", [9.0], limit_bytes=1)),
    )
    both = folder(tmp_path / "rows", rows, dtypes=("float32", "bfloat16"))
    found = judged({"over": "undivided", "at-least": 1.0, "where": {"dtype": "float32"}}, both)
    assert found == ("2 (rows, float32, 2 B)", True)


def test_columns_their_ratios_and_totals_are_judged(tmp_path: Path) -> None:
    ours = {"policy": "all", "limit_bytes": 2**20}
    rows = folder(
        tmp_path / "rows",
        [row("mucudnn", [0.1, 0.3, 0.2], workspace_bytes=2**19, relative_error=1e-6, **ours)],
        [row("mucudnn", [], workspace_bytes=2**20, failure="why", more={"note": 3}, **ours)],
    )
    place = "(rows, float32, all, 1 MiB)"
    for value, found, passed in (
        ({"value": "relative_error", "at-most": 1e-5}, f"1e-06 {place}", True),
        ({"value": "workspace_bytes", "at-most": "512KiB"}, f"1 MiB {place}", False),
        ({"value": "workspace_bytes / limit_bytes", "at-most": 1}, f"1 {place}", True),
        ({"value": "workspace_bytes / limit_bytes", "total": True, "at-most": 1}, f"1.5 {place}", False),
        ({"value": "failures", "at-most": 0}, f"1 {place}", False),
        ({"value": "time_s", "at-most": "200ms"}, f"0.2 {place}", True),
        ({"value": "note", "at-least": 4}, f"3 {place}", False),
        ({"value": "note", "where": {"layer": "layer 0"}, "at-least": 1}, "no measurement to judge this by", False),
        ({"of": "mucudnn-wd", "at-least": 0}, "no measurement to judge this by", False),
    ):
        assert judged(value, rows) == (found, passed), value


def test_of_rows_that_differ_in_a_column_the_fastest_count(tmp_path: Path) -> None:
    """Torch is faster in one memory format, mucudnn in the other, and each is compared in its own."""
    subjects = {name: {"network": "net", "memory_format": name} for name in ("contiguous", "channels_last")}
    rows = [
        *(("torch", "contiguous", 4.0, 100), ("torch", "channels_last", 3.0, 200)),
        *(("mucudnn", "contiguous", 1.0, 50), ("mucudnn", "channels_last", 2.0, 30)),
        *(("failing", "contiguous", None, 1), ("failing", "channels_last", 6.0, 400)),
    ]
    header = Header("training", "net", {}, ENVIRONMENT, ("network", "memory_format"), wanted=2)
    with open_folder(tmp_path / "rows", header) as writer:
        every = [
            Row(
                subjects[name],
                one,
                [time_s] * 3 if time_s else [],
                failure=None if time_s else "why",
                more={"bytes": n},
            )
            for one, name, time_s, n in rows
        ]
        writer.add(every)
        writer.write_summary()
    both = read_folder(tmp_path / "rows")
    fastest = {"fastest": "memory_format", "at-least": 0}
    for value, found in (
        ({"at-least": 1}, "1.5, 1.5 to 1.5 (rows, channels_last)"),
        (fastest, "3, 3 to 3 (rows)"),
        ({**fastest, "of": "failing"}, "0.5, 0.5 to 0.5 (rows)"),
        ({**fastest, "value": "bytes"}, "50 (rows)"),
        ({**fastest, "value": "bytes", "over": "torch"}, "0.25 (rows)"),
        ({"value": "bytes", "over": "torch", "at-most": 1}, "0.5 (rows, contiguous)"),
        ({**fastest, "value": "bytes", "over": "nobody"}, "no measurement to judge this by"),
    ):
        assert judged(value, both)[0] == found, value


# As users call it

MINE = """
published = ["4.54x somewhere else"]
[fixed]
command = "bench convolutions"
source = "{table}"
batch = 2
rounds = 2
algorithms = "gemm"
time-limit = "50ms"
memory-format = "contiguous"
[mutable]
operations = ["forward", "backward-data"]
[acceptable]
error = {{ value = "relative_error", at-most = 1e-5 }}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return written(tmp_path, MINE.format(table=one_layer(tmp_path)))


def test_recipes_are_listed_and_can_be_read() -> None:
    listed = invoke("bench", "recipe")
    assert listed.exit_code == 0, listed.output
    for name in SHIPPED:
        (line,) = (line for line in listed.output.splitlines() if f" {name} " in line)
        assert read_recipe(name).takes in line
        for device in ("cpu", "cuda"):
            read = read_recipe(name, device)
            assert read.runs
            assert {one.of for one in read.criteria} <= {"mucudnn", "mucudnn-wd"}


def test_a_recipe_runs_and_its_exit_status_is_the_verdict(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MachineLimits, "measured", lambda device, dtype: MachineLimits(200e3, 25e9))
    out, database = tmp_path / "out", tmp_path / "m.sqlite"
    command = ("bench", "recipe", mine, "--out", out, "--database", database, "--threads", 1)
    first = invoke(*command)
    assert first.exit_code == 0, first.output
    assert "published elsewhere: 4.54x somewhere else" in first.output
    assert {path.name for path in out.iterdir()} == {"forward", "backward-data"}
    measured = [(path / "rows.jsonl").read_bytes() for path in sorted(out.iterdir())]
    mine.write_text(mine.read_text().replace("1e-5", "1e-30"))
    second = invoke(*command)
    assert second.exit_code == 1, second.output
    assert "NOT MET" in second.output
    assert [(path / "rows.jsonl").read_bytes() for path in sorted(out.iterdir())] == measured
    assert invoke("report", out).exit_code == 0


def test_several_sources_are_words_of_the_command(tmp_path: Path) -> None:
    fixed = '[fixed]\ncommand = "bench training"\nsources = "alexnet,vgg-16"\n'
    said = fail("bench", "recipe", written(tmp_path, fixed, ACCEPTABLE), "--out", tmp_path / "out")
    assert "did you mean vgg16?" in said


def test_what_the_command_refuses_is_told_before_anything_runs(mine: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    assert "did you mean three-policies?" in fail("bench", "recipe", "three-policy", *out)
    assert "a recipe needs a folder for its results: add --out DIR" in fail("bench", "recipe", mine)
    text = mine.read_text()
    for old, new, said in (
        ("batch = 2", "batch = -2", "mine.toml: Invalid value for '--batch': the number is -2"),
        ("batch", "bach", "mine.toml: No such option '--bach'. (Did you mean "),
        ("bench convolutions", "tune", "[fixed] command is 'tune'; name a command with --out"),
        ("bench convolutions", "bench recipe", "[fixed] command is 'bench recipe'; name a command with --out"),
        ("bench convolutions", "bench", "[fixed] command is 'bench'; name a command with --out"),
    ):
        mine.write_text(text.replace(old, new))
        assert said in fail("bench", "recipe", mine, *out)
    assert not (tmp_path / "out").exists()
