"""Numbers on the page, of times that are simple enough to compute them by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.clock.machine import ENVIRONMENT
from support.tables_of_page import PageParser

from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.results.pages.page import html_of, report_of, reports_in, write_frame, write_layers
from mucudnn.bench.results.reading import PROBLEM_COLUMNS, Header, problem_columns, read_folder
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.core.problem import ConvProblem, Operation

pytest.importorskip("jinja2")
# 2 * 4 samples * 8 * 8 places * 16 * 8 channels * 9 taps
FLOPS, TIMES_S = 589_824, {"forward": (0.4, 0.1), "backward_data": (0.2, 0.1), "backward_filter": (0.6, 0.4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path, limits = tmp_path / "folder", {"float32": MachineLimits(FLOPS * 20, 1e12)}  # the least time is 50 ms
    columns = ("layer", *PROBLEM_COLUMNS)
    header = Header("convolutions", "a net", {}, ENVIRONMENT, subject_columns=columns, wanted=3, limits=limits)
    with open_folder(path, header) as writer:
        for operation in Operation:
            problem = ConvProblem(operation, 8, 8, 8, 16, 3, 3, padding=1)
            subject = {"layer": "conv", **problem_columns(problem, 4)}
            torch_s, ours_s = TIMES_S[operation]
            ours = (0.9 * ours_s, ours_s, 1.2 * ours_s)
            writer.add(
                [
                    Row(subject, "torch", (torch_s,) * 3, more={"count": 2}),
                    Row(subject, "mucudnn", ours, "all", 2**20, "gemm 4", 2**19, 1e-6, more={"count": 2}),
                ]
            )
        writer.write_summary()
    return path


def test_numbers_of_operations_layers_and_contestants(folder: Path) -> None:
    tables = PageParser(html_of(reports_in(folder), with_pictures=False)).tables
    torchs, ours = tables["operations"].records()[:2]
    expected = {
        "contestant: workspace limit, MiB": "1",
        "speedup, 95 % interval: speedup over PyTorch": "4.000",
        "speedup, 95 % interval: from": "3.333",
        "speedup, 95 % interval: to": "4.444",
        "time: median, ms": "100.0000",
        "time: spread, %": "15.0",
        "time: samples": "3",
        "configuration: configuration": "gemm 4",
        "mucudnn: workspace, MiB": "0.500",
        "mucudnn: relative error": "1.0e-06",
        "limit: time / bound": "2.000",
    }
    assert {name: ours[name] for name in expected} == expected
    assert torchs["limit: time / bound"] == "8.000"
    _, ours = tables["layers"].records()
    expected = {
        "speedup, 95 % interval: speedup over PyTorch": "2.000",
        "time, ms: backward parameters": "400.0000",
        "time, ms: total": "600.0000",
        "limit: time / bound": "4.000",
        "DeepBench's columns: n": "4",
    }
    assert {name: ours[name] for name in expected} == expected
    _, ours = tables["summary"].records()
    expected = {
        "contestant: timed": "3",
        "speedup over PyTorch, geometric mean: speedup": f"{(4 * 2 * 1.5) ** (1 / 3):.3f}",
        "speedup over PyTorch, geometric mean: backward inputs": "2.000",
        "limit: time / bound, geometric mean": f"{(2 * 2 * 8) ** (1 / 3):.3f}",
        "sum of times: sum, ms": "1200.0000",
        "sum of times: PyTorch for the same, ms": "2400.0000",
    }
    assert {name: ours[name] for name in expected} == expected


def test_files_for_programs_have_the_same_with_all_digits(folder: Path, tmp_path: Path) -> None:
    report = report_of(read_folder(folder))
    write_layers(report.layers, tmp_path / "layers.csv")
    write_frame(report.rows, tmp_path / "operations.csv")
    with (tmp_path / "operations.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["time_s"]) for row in rows] == [time_s for pair in TIMES_S.values() for time_s in pair]
    assert [float(row["flops"]) for row in rows] == [FLOPS] * 6
    assert "samples_s" not in rows[0]
    with (tmp_path / "layers.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0])[:6] == ["layer", "w", "h", "c", "n", "k"]
    assert [float(row["total_ms"]) for row in rows] == pytest.approx([1200, 600])
