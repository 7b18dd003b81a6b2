"""``mucudnn bench numerics``: what it says of each algorithm follows from how that computes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path

import pytest
import torch
from support.command_line import invoke
from support.database_rows import HERE
from support.places import TESTS
from support.snapshots import assert_as_stored
from torch import Tensor

from mucudnn import ConvProblem, Operation
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.folders.rows import Line, Row
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.suites.accuracy import numerics
from mucudnn.bench.suites.accuracy.numerics import (
    SAMPLES,
    benchmark_numerics,
    dependent_results,
    geometries,
    measure,
    numerics_tables,
    with_pixel,
)
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.winograd.algorithms import ALGORITHMS, Winograd
from mucudnn.kernels.winograd.cook_toom import Matrix
from mucudnn.measuring.operands import Operands, random_operands

PAGE = TESTS.parent / "docs" / "compatibility.md"
WINOGRAD = [winograd for winograd in ALGORITHMS if winograd.stride == 1]  # as the geometries
PROBLEMS = {
    (str(problem.operation), f"{problem.r}x{problem.s}", f"{problem.h}x{problem.w}"): problem
    for operation in Operation
    for problem in geometries(operation)
}
IMAGES = [operation for operation in Operation if operation is not Operation.BACKWARD_FILTER]


Rows = dict[tuple[str, Operation], Line]  # by algorithm and operation


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = tmp_path_factory.mktemp("numerics") / "out"
    benchmark_numerics(tuple(Operation), "float32", folder)
    found: Rows = {}
    for row in read_folder(folder).lines:
        found.setdefault((row["contestant"], Operation(row["operation"])), row)
    return found


def problem_of(row: Line) -> ConvProblem:
    return PROBLEMS[row["operation"], row["filter"], row["image"]]


def pixel_alone(problem: ConvProblem) -> Operands:
    """Ones, and in the image all zeros but for the pixel."""
    operands = Operands(*(torch.ones(t.shape) for t in _tensors(random_operands(problem, SAMPLES))))
    image = "y" if problem.operation is Operation.BACKWARD_DATA else "x"
    return with_pixel(problem, replace(operands, **{image: torch.zeros_like(getattr(operands, image))}), 1.0)


def _tensors(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    return operands.x, operands.w, operands.y


def reached(winograd: Winograd, position: int, size: int, padding: int) -> int:
    """Along one axis: results that have a path through the matrices from the element at this position."""
    matrices = winograd.matrices

    def has_path(output: int, element: int) -> bool:
        points = range(matrices.a)
        return any(_holds(matrices.a_t, output, p) and _holds(matrices.b_t, p, element) for p in points)

    return sum(
        has_path(i % winograd.m, element)
        for i in range(size)
        if 0 <= (element := position + padding - i // winograd.m * winograd.m) < matrices.a
    )


def _holds(matrix: Matrix, row: int, column: int) -> bool:
    return matrix[row][column] != 0


def test_every_algorithm_has_a_row_for_each_operation(rows: Rows) -> None:
    every = ((a, problem) for a in algorithms() for operation in Operation for problem in geometries(operation))
    assert set(rows) == {(a.name, problem.operation) for a, problem in every if a.supports(problem) is None}


def test_winograd_spoils_what_its_matrices_connect(rows: Rows) -> None:
    for winograd, operation in product(WINOGRAD, IMAGES):
        row = rows[winograd.name, operation]
        problem = problem_of(row)
        padding = problem.padding[0] if operation is Operation.FORWARD else problem.r - 1 - problem.padding[0]
        expected = problem.k * reached(winograd, problem.h // 2, problem.h, padding) ** 2
        assert row["nan_results"] == row["inf_results"] == expected, (winograd.name, operation)


def test_what_is_local_spoils_what_the_definition_says_and_fourier_transforms_all_that_they_read(rows: Rows) -> None:
    for (name, operation), row in rows.items():
        problem = problem_of(row)
        expected = int(dependent_results(problem, pixel_alone(problem)).sum())
        if row["local"]:
            assert row["nan_results"] == row["inf_results"] == expected, name
        if name == "fft":
            everything = problem.r * problem.s if operation is Operation.BACKWARD_FILTER else problem.h * problem.w
            assert row["nan_results"] == row["inf_results"] == problem.k * everything
        assert row["nan_results"] >= expected, name


def test_transforms_overflow_earlier_and_lose_what_is_small_beside_an_outlier(rows: Rows) -> None:
    torchs = rows["native", Operation.FORWARD]
    for name in ("winograd-4x4", "winograd-6x6", "fft"):
        row = rows[name, Operation.FORWARD]
        assert row["largest"] < torchs["largest"] / 2, name
        assert row["outlier_error"] > 1000 * torchs["outlier_error"], name
    for row in rows.values():
        assert row["keeps_subnormals"], row["contestant"]
        assert row["relative_error"] < 1e-5, row["contestant"]


def test_the_numbers_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another arithmetic gives another row: one that hides, overflows early, flushes, and rounds to 7 bits."""

    def hiding(problem: ConvProblem, configuration: object, operands: Operands) -> Tensor:
        y = torch.nn.functional.conv2d(operands.x, operands.w, padding=problem.padding)
        rounded = y.nan_to_num(0.0, 0.0, 0.0).bfloat16().float()
        limited = torch.where(rounded.abs() > 2.0**100, inf, rounded)
        return torch.where(limited.abs() < torch.finfo(torch.float32).smallest_normal, 0.0, limited)

    problem = geometries(Operation.FORWARD)[0]
    honest = measure("native", problem)
    monkeypatch.setattr(numerics, "run_whole", hiding)
    row = measure("native", problem)
    assert [row.more[name] for name in ("nan_results", "inf_results", "keeps_subnormals")] == [0, 0, False]
    assert row.relative_error is not None
    assert honest.relative_error is not None
    assert row.relative_error > 1000 * honest.relative_error
    assert row.more["outlier_error"] > 1000 * honest.more["outlier_error"]
    assert row.more["largest"] <= 2.0**100 < honest.more["largest"]


# The table, the command and the page


def test_the_table_has_a_line_for_each_geometry_and_a_value_for_each_operation(tmp_path: Path) -> None:
    columns = ("operation", "filter", "image", "dtype")
    header = Header(*("numerics", "small images", {"dtype": "float32"}, HERE), columns, wanted=3, is_timed=False)
    with open_folder(tmp_path / "out", header) as folder:
        for operation in Operation:
            subject = dict(zip(columns, (str(operation), "3x3", "16x16", "float32"), strict=True))
            for name, results, error in (("native", 36, 1e-7), ("winograd-4x4", 100 + len(operation), 1e-6)):
                more = {"local": name == "native", "nan_results": results, "inf_results": results}
                more |= {"largest": 2.0**127, "outlier_error": error, "keeps_subnormals": True}
                folder.add([Row(subject, name, relative_error=error, more=more)])
    assert_as_stored("bench-numerics", *numerics_tables(read_folder(tmp_path / "out")))


def test_the_command_prints_and_writes_what_the_folder_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = geometries(Operation.FORWARD, "float16")[0], ["native", "winograd-4x4", "gemm"]
    monkeypatch.setattr(numerics, "_cases", lambda *_: [case])
    files = ("--csv", tmp_path / "n.csv", "--json", tmp_path / "n.json", "--out", tmp_path / "folder")
    asked = ("bench", "numerics", "--operations", "forward", "--dtype", "float16", "--threads", "1", *files)
    first = invoke(*asked)
    assert first.exit_code == 0, first.output
    for expected in ("winograd-4x4", "float16", "NaN spoils", "3×3, 16×16", "beside PyTorch's own (native): forward "):
        assert expected in first.output
    lines = read_folder(tmp_path / "folder").lines
    assert [(line["contestant"], line["dtype"]) for line in lines] == [(name, "float16") for name in case[1]]
    assert json.loads((tmp_path / "n.json").read_text())["rows"] == list(lines)
    with (tmp_path / "n.csv").open(newline="") as stream:
        assert [line["contestant"] for line in csv.DictReader(stream)] == case[1]
    monkeypatch.setattr(numerics, "measure", None)  # nothing is computed again
    assert invoke(*asked).stdout == first.stdout
    shown = invoke("report", tmp_path / "folder").output
    assert "nan results" in shown
    assert "no time" not in shown


def test_the_page_has_the_counts_of_every_algorithm(rows: Rows) -> None:
    """Rounding errors depend on the machine; what is spoilt does not."""
    table = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    names = {name for name, _ in rows}
    said = {line[0]: line[2] for line in reversed(table) if (line or [""])[0] in names}  # the first of several
    for name in names:
        counts = [f"{rows[name, operation]['nan_results']:,}" for operation in Operation]
        assert said[name] in (" / ".join(counts), counts[0]), name
    assert set(said) == names
