"""Result folders: what is written is read back, a killed run goes on, and what is wrong is told with file and line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.clock.machine import ENVIRONMENT

from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.results.reading import (
    HEADER_FILE,
    PROBLEM_COLUMNS,
    ROWS_FILE,
    SUMMARY_FILE,
    Header,
    problem_columns,
    problem_of,
    read_folder,
)
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.core.errors import InvalidInputError, OutputError
from mucudnn.core.problem import ConvProblem, MemoryFormat
from mucudnn.measuring.load import Load

HEADER = Header(
    benchmark="network",
    source="a network",
    settings={"rounds": 3, "batch_sizes": [2]},
    environment=ENVIRONMENT,
    subject_columns=("layer",),
    wanted=2,
    limits={"float32": MachineLimits(35e9, 12e9), "bfloat16": MachineLimits()},
)
NUMBERS = ("limit_bytes", "workspace_bytes", "relative_error", "load")
SAMPLES = {"torch": (0.3, 0.1, 0.2), "mucudnn": (0.06, 0.05, 0.07)}


def rows(layer: str = "conv1") -> list[Row]:
    return [Row({"layer": layer}, name, samples, configuration=f"{name} 2") for name, samples in SAMPLES.items()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "results" / "today"
    with open_folder(path, HEADER) as writer:
        writer.add(rows(), Load(others_share=0.25))
        writer.write_summary([("conv2", "no time was left")])
    return path


def lines(folder: Path) -> list[str]:
    return (folder / ROWS_FILE).read_text().splitlines()


def test_what_is_written_is_read_back(folder: Path) -> None:
    read = read_folder(folder)
    assert read.header == HEADER
    assert list(read.rows["contestant"]) == ["torch", "mucudnn"]
    assert list(map(tuple, read.rows["samples_s"])) == list(SAMPLES.values())
    assert list(read.rows["time_s"]) == [0.2, 0.06]
    assert list(read.rows["load"]) == [0.25, 0.25]
    assert read.left_out == {"no time was left": ["conv2"]}
    assert read.problems == ()


def test_a_problem_is_in_its_columns() -> None:
    problem = ConvProblem(
        *("backward_filter", 8, 10, 12, 16, 3, 5), (2, 1), (1, 2), (1, 2), 4, "bfloat16", MemoryFormat.CHANNELS_LAST
    )
    columns = problem_columns(problem, 32)
    assert tuple(columns) == PROBLEM_COLUMNS
    assert problem_of(json.loads(json.dumps(columns))) == problem


def test_a_run_goes_on_where_it_stopped(folder: Path) -> None:
    again = replace(HEADER, identity="another", limits={})  # what was measured once is not measured again
    with open_folder(folder, again) as writer:
        assert [line["contestant"] for line in writer.known({"layer": "conv1"})] == ["torch", "mucudnn"]
        assert writer.known({"layer": "conv2"}) == []
        writer.add(rows("conv2"))
        writer.write_summary()
    read = read_folder(folder)
    assert read.header == HEADER
    assert list(read.rows["layer"]) == ["conv1", "conv1", "conv2", "conv2"]
    assert list(read.rows["turns"]) == [1, 1, 2, 2]
    assert json.loads((folder / SUMMARY_FILE).read_text())["measured"] == 2


def test_a_row_that_was_being_written_is_lost_alone(folder: Path) -> None:
    """The second of two turns is cut anywhere: the first is there, the second is reported, and measured again."""
    first = (folder / ROWS_FILE).read_bytes()
    with open_folder(folder, HEADER) as writer:
        writer.add(rows("conv2"))
    both = (folder / ROWS_FILE).read_bytes()
    for kept in (0.1, 0.4, 0.6, 0.99):
        (folder / ROWS_FILE).write_bytes(both[: len(first) + int(kept * (len(both) - len(first)))])
        read = read_folder(folder)
        assert list(read.rows["layer"])[:2] == ["conv1", "conv1"]
        assert len(read.rows) < 4
        assert read.problems
        assert all(str(folder / ROWS_FILE) in problem for problem in read.problems)
        with open_folder(folder, HEADER) as writer:
            assert writer.known({"layer": "conv2"}) == []
            writer.add(rows("conv2"))
        assert list(read_folder(folder).rows["layer"]) == ["conv1", "conv1", "conv2", "conv2"]


def test_other_settings_are_refused_by_name(folder: Path) -> None:
    before = lines(folder)
    for other, told in (
        ({"settings": {**HEADER.settings, "rounds": 5}}, "rounds was 3 and is 5"),
        ({"settings": {**HEADER.settings, "strict": True}}, "strict was not set and is True"),
        ({"source": "other"}, "source was a network and is other"),
        ({"environment": replace(ENVIRONMENT, torch="3.0")}, f"torch was {ENVIRONMENT.torch} and is 3.0"),
        ({"mucudnn": "9.9"}, "mucudnn was "),
    ):
        with (
            pytest.raises(InvalidInputError, match=re.escape(told)),
            open_folder(folder, replace(HEADER, **other)),  # type: ignore[arg-type]
        ):
            pass
    assert lines(folder) == before


def test_two_writers_are_one_too_many(folder: Path) -> None:
    with open_folder(folder, HEADER), pytest.raises(OutputError, match="another process"), open_folder(folder, HEADER):
        pass


def test_an_invalid_line_is_reported_and_the_others_are_shown(folder: Path) -> None:
    with open_folder(folder, HEADER) as writer:
        writer.add(rows("conv2"))
    whole = (folder / ROWS_FILE).read_text()
    for column, value, told in (
        ("samples_s", None, "samples_s is None, not a list of seconds above 0"),
        ("samples_s", [0.1, float("nan")], "NaN is not a finite number"),
        ("samples_s", [0.1, None, 0.2], "samples_s is [0.1, None, 0.2], not a list of seconds above 0"),
        ("samples_s", [0.1, -1.0], "samples_s is [0.1, -1.0], not"),
        ("samples_s", "fast", "samples_s is 'fast', not"),
        ("samples_s", [], "samples_s is empty without a failure"),
        ("folder", "other", "a row of another folder, other"),
        ("format_version", 2, "format version 2, not 1"),
        ("turns", "one", "turns is 'one', not a whole number above 0"),
        ("contestant", None, "contestant is None, not a text"),
        *((name, "many", f"{name} is 'many', not a number of at least 0, or null") for name in NUMBERS),
        *((name, ..., f"no column {name}") for name in ("samples_s", "layer")),
    ):
        every = [json.loads(line) for line in whole.splitlines()]
        every[1] = {name: each for name, each in {**every[1], column: value}.items() if each is not ...}
        (folder / ROWS_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in every))
        read = read_folder(folder)
        assert f"{folder / ROWS_FILE}, line 2: {told}" in read.problems[0]
        assert list(read.rows["layer"]) == ["conv1", "conv2", "conv2"]
        assert "turns 1 has 1 of 2 rows" in read.problems[1]
        with open_folder(folder, HEADER) as writer:
            assert writer.known({"layer": "conv1"}) == []  # to be measured again, its partner too


def test_an_invalid_environment_file_is_refused(folder: Path) -> None:
    path = folder / HEADER_FILE
    whole = path.read_text()
    for text, told in (
        (whole[:40], "line 3: invalid JSON"),
        ("[]", "line 1: not a JSON object, but list"),
        (whole.replace('"format_version": 1', '"format_version": 2'), "format version 2; mucudnn "),
        (whole.replace('"settings"', '"sittings"'), "has no 'settings'"),
        (whole.replace('"wanted": 2', '"wanted": "two"'), "an invalid value"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match=re.escape(told)) as caught:
            read_folder(folder)
        assert str(path) in str(caught.value)


def test_the_better_of_the_machines_limits_stay(folder: Path) -> None:
    with open_folder(folder, HEADER) as writer:
        writer.improve_limits({"float32": MachineLimits(30e9, 13e9)})
    assert read_folder(folder).header.limits["float32"] == MachineLimits(35e9, 13e9)
    with open_folder(folder, HEADER) as writer:  # and a run goes on
        assert writer.known({"layer": "conv1"})


def test_where_nothing_is_timed_rows_need_no_samples(tmp_path: Path) -> None:
    header = replace(HEADER, is_timed=False)
    with open_folder(tmp_path / "results", header) as writer:
        writer.add([Row({"layer": "conv1"}, "torch", relative_error=1e-7)])
        writer.write_summary()
    read = read_folder(tmp_path / "results")
    assert (read.header, read.problems, list(read.rows["relative_error"])) == (header, (), [1e-7])


def test_where_folders_lie_inside_they_are_named(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"name one of them: {re.escape(str(folder))}$"):
        read_folder(folder.parent)
    with pytest.raises(InvalidInputError, match=f"name one of them: {re.escape(str(folder))}$"):
        read_folder(folder.parent.parent)
    (folder / HEADER_FILE).unlink()
    with pytest.raises(InvalidInputError, match="name a folder that a benchmark wrote"):
        read_folder(folder.parent)
