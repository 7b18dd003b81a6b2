"""Raw samples as they are told: what is asked for, the long frame, the table and JSON, against definitions."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import pandas
import pytest
from rich.console import Console
from support.database_rows import FAST, HERE, PAIRS, PROBLEM, SAMPLES, VERIFIED, VERSIONS, fill

from mucudnn.bench.report.export import write_csv
from mucudnn.bench.report.records import Record
from mucudnn.bench.report.samples import sample_rows, samples_table, series, wanted
from mucudnn.database.database import Database
from mucudnn.database.schema import Row
from mucudnn.words.problem import Operation
from mucudnn.words.results import MicroConfig

BACKWARD = PROBLEM.with_operation(Operation.BACKWARD_FILTER)
ELSEWHERE = replace(HERE, threads=1)
OF_A_LIBRARY = replace(FAST, micro_config=MicroConfig("library:67 k2=5", 8), raw=None)


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    with Database(fill(tmp_path / "full.sqlite")) as database:
        database.add(HERE, BACKWARD, 1, OF_A_LIBRARY)
        database.add(ELSEWHERE, PROBLEM, 1, FAST)
        return database.every_row()


def described(rows: list[Row]) -> list[tuple[object, ...]]:
    return [tuple(row[name] for name in ("kind", "algorithm", "operation", "threads")) for row in rows]


FORWARD_HERE = ("measurement", "gemm", "forward", 2)
FILTER_HERE = ("measurement", "library:67 k2=5", "backward_filter", 2)
FORWARD_THERE = ("measurement", "gemm", "forward", 1)
WHOLE_RUN = ("verification", None, "forward", 2)


def test_what_is_asked_for(rows: list[Row]) -> None:
    for asked, expected in (
        ({}, [FORWARD_HERE, WHOLE_RUN, FILTER_HERE, FORWARD_THERE]),
        ({"environments": [ELSEWHERE]}, [FORWARD_THERE]),
        ({"environments": []}, []),
        ({"operations": [Operation.BACKWARD_FILTER]}, [FILTER_HERE]),
        ({"algorithms": ["gemm"]}, [FORWARD_HERE, WHOLE_RUN, FORWARD_THERE]),
        ({"algorithms": ["library"]}, [FILTER_HERE]),
        ({"algorithms": ["library:67 k2=5"]}, [FILTER_HERE]),
        ({"algorithms": ["fft"]}, []),  # it failed
        ({"parts": ["64X27x28", "5x4"]}, [FORWARD_HERE, WHOLE_RUN, FILTER_HERE, FORWARD_THERE]),
        ({"parts": ["backward", "float32"]}, [FILTER_HERE]),
        ({"parts": ["64x27x28", "3x3"]}, []),
    ):
        given = {"environments": [HERE, ELSEWHERE], **asked}
        assert described(wanted(rows, **given)) == expected  # type: ignore[arg-type]


def every(rows: list[Row]) -> list[Record]:
    return [*series(wanted(rows, [HERE]))]


def test_each_time_is_a_series(rows: list[Row]) -> None:
    assert {one["of"]: tuple(one["samples_s"]) for one in every(rows)} == {
        "setup_s": SAMPLES.setup_samples_s,
        "step_s": SAMPLES.step_samples_s,
        "baseline_s": PAIRS.baseline_samples_s,
        "time_s": PAIRS.time_samples_s,
    }


def test_the_file_has_a_row_for_each_sample_to_the_last_bit(rows: list[Row], tmp_path: Path) -> None:
    write_csv(tmp_path / "samples.csv", sample_rows(every(rows)))
    read = pandas.read_csv(tmp_path / "samples.csv")
    assert list(read["sample_s"]) == [sample for one in every(rows) for sample in one["samples_s"]]


def text_of(rows: list[Row]) -> list[list[str]]:
    """The cells of the table's lines."""
    stream = io.StringIO()
    Console(file=stream, width=320).print(samples_table(HERE, every(rows)))
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_the_table_says_what_the_samples_say(rows: list[Row]) -> None:
    of_step = next(cells for cells in text_of(rows) if cells[2] == "step")
    lower, middle, upper = quantiles(SAMPLES.step_samples_s, n=4, method="inclusive")
    assert middle == median(SAMPLES.step_samples_s)
    assert of_step[1:10] == [
        *("gemm 8", "step", "5", f"{middle * 1e3:.4g}", f"{lower * 1e3:.4g} to {upper * 1e3:.4g}"),
        *(f"{min(SAMPLES.step_samples_s) * 1e3:.4g}", "unknown", "25%", "2.40 GHz"),
    ]


def test_what_was_run_whole_is_told(tmp_path: Path) -> None:
    two = [MicroConfig("gemm", 8)] * 2 + [MicroConfig("fft", 4)]
    with Database(tmp_path / "runs.sqlite") as database:
        for fresh in (False, True):
            database.add_whole_run(HERE, PROBLEM, two, VERSIONS, VERIFIED, fresh=fresh)
        rows = database.every_row()
    told = list(dict.fromkeys(cells[1] for cells in text_of(rows)))
    text = "gemm 8×2 + fft 4"
    assert told == [text, f"{text}, fresh workspace"]
