"""Metrics of a layer's algorithms against their definitions, and that each of them notices what it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle, product
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_line import fail, invoke, one_layer
from torch import Tensor

from mucudnn import ConvProblem, Operation
from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.results.pages.page import report_of
from mucudnn.bench.results.reading import Line, ResultFolder, read_folder
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.suites.metrics import RUNS, benchmark_layer, layer_tables
from mucudnn.bench.suites.shared.layer_calls import (
    PASSED,
    cut_down,
    distinct_results,
    error_norms,
    gradcheck,
    module_of,
    through_module,
)
from mucudnn.cli.bench.metrics import parse_configuration
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.records import MicroConfig
from mucudnn.core.tables import Table
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.kernels.torch_ops.gemm import GEMM
from mucudnn.measuring.clocks import WallClock
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.whole_runs import Machine
from mucudnn.testing.checks import IMAGE, dependent

PROBLEM = ConvProblem(Operation.FORWARD, 2, 7, 8, 3, 3, 3, padding=(1, 1))
LAYER = Layer(("layer",), PROBLEM, 2)


@pytest.fixture(scope="module", autouse=True)
def no_limits() -> Iterator[None]:
    """Measuring the machine's limits takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MachineLimits, "measured", classmethod(lambda cls, device, dtype: cls(1e9, 1e9)))
        yield


@pytest.fixture(scope="module")
def whole(no_limits: None, tmp_path_factory: pytest.TempPathFactory) -> ResultFolder:
    """Every operation, by torch and by some algorithms."""
    return measure(tmp_path_factory.mktemp("whole") / "out", algorithms=("gemm", "winograd-4x4", "fft", "pointwise"))


def measure(path: Path, **options: Any) -> ResultFolder:
    machine = replace(Machine.current(), clock=WallClock())
    settings = {name: options.pop(name) for name in ("operations", "algorithms") if name in options}
    benchmark_layer("a source", LAYER, Config(**settings), path, rounds=3, machine=machine, **options)
    return read_folder(path)


def exact(problem: ConvProblem, operands: Operands) -> Tensor:
    return reference(problem, operands.x, operands.w, operands.y)


# Metrics


def test_norms_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    actual, expected = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    error = np.abs(actual.numpy().astype(np.float64) - expected.numpy())
    norms = error_norms(actual, expected)
    assert norms["error_l1"] == pytest.approx(error.sum())
    assert norms["error_l2"] == pytest.approx(np.sqrt((error**2).sum()))
    assert norms["error_max"] == error.max()
    assert set(error_norms(expected, expected).values()) == {0.0}
    assert set(error_norms(torch.tensor([nan]), torch.tensor([0.0])).values()) == {inf}


def test_results_are_compared_bit_by_bit() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        one = torch.tensor([[1.0, nan, 0.0]], dtype=dtype)
        last_bit = one * (1 + torch.finfo(dtype).eps)
        negative = one.copysign(torch.tensor(-1.0, dtype=dtype))
        assert [distinct_results([one, other, one.clone()]) for other in (one, negative, last_bit)] == [1, 2, 2]


def test_the_layer_cut_down_keeps_what_decides_how_it_is_computed() -> None:
    problem = ConvProblem(Operation.FORWARD, 96, 56, 60, 192, 5, 3, (2, 1), (2, 1), (1, 2), 32)
    small, large = cut_down(problem)
    for one in (small, large):
        assert (one.r, one.s, one.stride, one.padding, one.dilation) == (5, 3, (2, 1), (2, 1), (1, 2))
        assert (one.c, one.k, one.groups, one.dtype) == (6, 6, 2, "float64")
    assert (large.h, large.w) == (56, 60)
    assert small.h < 12
    assert small.p > 1


def test_a_module_computes_the_operation_by_what_was_asked_for() -> None:
    parts = [MicroConfig("winograd-2x2", 2), MicroConfig("winograd-2x2", 2), MicroConfig("gemm", 3)]
    divided = parse_configuration("winograd-2x2 2x2 + gemm 3")
    assert list(divided.micro_configs) == parts
    for operation, memory_format in product(Operation, MemoryFormat):
        problem = replace(PROBLEM, operation=operation, memory_format=memory_format)
        operands = random_operands(problem, 7)
        names = [algorithm.name for algorithm in algorithms() if algorithm.supports(problem) is None]
        for one in (*(parse_configuration(f"{name} 7") for name in names), divided):
            result = through_module(one, problem, operands)().detach()
            assert relative_l2_error(result, exact(problem, operands)) < 1e-5, one


@pytest.mark.parametrize(("operation", "memory_format"), [*zip(Operation, cycle(MemoryFormat))])
def test_the_gradcheck_finds_a_wrong_operation(
    operation: Operation, memory_format: MemoryFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(cut_down(PROBLEM)[0], operation=operation, memory_format=memory_format)
    module = module_of(parse_configuration("gemm 2"), problem, random_operands(problem, 2).w)
    assert gradcheck(module, problem, 2) == PASSED
    step = type(GEMM).step

    def wrong(self: Any, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: Any) -> None:
        step(self, problem, x, w, y, *rest)
        Operands(x, w, y).written(problem.operation).mul_(1.01)

    monkeypatch.setattr(type(GEMM), "step", wrong)
    assert gradcheck(module, problem, 2).startswith("failed: ")


# The benchmark


def test_a_folder_has_all_metrics_of_every_operation(whole: ResultFolder) -> None:
    rows = whole.lines
    assert [row["contestant"] for row in rows] == ["torch", "gemm", "winograd-4x4", "fft"] * 3
    assert list(dict.fromkeys(row["operation"] for row in rows)) == [str(operation) for operation in Operation]
    for row in rows:
        problem = PROBLEM.with_operation(row["operation"])
        size = exact(problem, random_operands(problem, 2)).numel()
        assert row["failure"] is None
        assert row["gradcheck"] == PASSED or row["contestant"] == "winograd-4x4"  # has no float64
        assert (row["distinct_results"], row["runs"]) == (1, RUNS)
        assert 0 < row["error_max"] <= row["error_l2"] <= row["error_l1"] <= size * row["error_max"]
        assert 0 < row["relative_error"] < 1e-5
        assert len(row["samples_s"]) >= 3
    assert [*whole.left_out] == ["the filter is 3x3; pointwise takes 1x1"]
    assert measure(whole.path, algorithms=("gemm", "winograd-4x4", "fft", "pointwise")).lines == rows


def test_nan_spreads_as_the_definition_says_or_as_the_transform_does(whole: ResultFolder) -> None:
    for row in whole.lines:
        problem = PROBLEM.with_operation(row["operation"])
        allowed = dependent(problem, IMAGE[problem.operation], 2)
        assert row["not_finite_by_definition"] == allowed.sum()
        assert row["local"] is (row["contestant"] in ("torch", "gemm"))
        if row["local"]:
            assert row["not_finite"] == allowed.sum()
        elif row["operation"] == Operation.BACKWARD_FILTER:
            assert row["not_finite"] == allowed.any(dim=(0, 2, 3)).sum() * allowed[:, 0].numel()
        elif row["contestant"] == "fft":  # all that it reads
            assert row["not_finite"] == allowed.numel()
        else:
            assert allowed.sum() < row["not_finite"] < allowed.numel()


def change_gemm(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], object]) -> None:
    """Change what gemm writes in forward."""
    step = type(GEMM).step

    def changed(self: object, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: object) -> None:
        step(self, problem, x, w, y, *rest)  # type: ignore[arg-type]
        change(y)

    monkeypatch.setattr(type(GEMM), "step", changed)


FORWARD = (Operation.FORWARD,)


def gemm_row(folder: ResultFolder) -> Line:
    torchs, gemm = folder.lines
    assert torchs["gradcheck"] == PASSED  # nobody else is blamed
    return gemm


def test_a_wrong_part_of_a_configuration_is_reported_and_invalid_configurations_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_gemm(monkeypatch, lambda y: y.mul_(2.0))
    asked = (parse_configuration("direct 1 + gemm 1"),)
    row = gemm_row(measure(tmp_path / "out", operations=FORWARD, configurations=asked))
    assert row["contestant"] == str(asked[0])
    assert 0.5 < row["relative_error"] < 0.9
    assert row["gradcheck"].startswith("failed: ")
    with pytest.raises(InvalidInputError, match="'gemm 5' has 5 samples, and the layer 2: give one of 2 samples"):
        measure(tmp_path / "other", configurations=(parse_configuration("gemm 5"),))
    for text in ("gemm", "gemm x", "gemm 2xx", "gemm 2 +", "", "gemm 0"):
        with pytest.raises(InvalidInputError):
            parse_configuration(text)


def test_a_wrong_algorithm_is_told_by_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_gemm(monkeypatch, lambda y: y.nan_to_num_(0.0, 0.0, 0.0).mul_(1.01))
    row = gemm_row(measure(tmp_path / "out", operations=FORWARD, algorithms=("gemm",)))
    assert row["relative_error"] == pytest.approx(0.01, rel=1e-3)
    assert row["gradcheck"].startswith("failed: ")
    assert row["distinct_results"] == 1
    assert row["not_finite"] == 0 < row["not_finite_by_definition"]  # it hides NaN


def test_what_does_not_repeat_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(1)
    change_gemm(monkeypatch, lambda y: y[0, 0, 0, 0].fill_(float(next(calls))))
    row = gemm_row(measure(tmp_path / "out", operations=FORWARD, algorithms=("gemm",)))
    assert row["distinct_results"] == row["runs"] == RUNS


def test_an_algorithm_that_fails_has_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(y: Tensor) -> None:
        raise RuntimeError("no luck\nand a stack trace")

    change_gemm(monkeypatch, fail)
    folder = measure(tmp_path / "out", operations=FORWARD, algorithms=("gemm",))
    assert gemm_row(folder)["failure"] == "no luck"
    table, _ = layer_tables(folder)
    assert isinstance(table, Table)
    assert any("no luck" in row for row in table.rows)
    assert report_of(folder).tables


# What users see


def test_tables_of_a_folder(whole: ResultFolder) -> None:
    table, text = layer_tables(whole)
    assert isinstance(table, Table)
    assert sum(map(bool, table.rows)) == 12
    assert "pointwise: the filter is 3x3; pointwise takes 1x1" in str(text)
    assert str(text).count("gradcheck not done") == 1  # of Winograd, which has no float64
    (problems,) = (table for table in report_of(whole).tables if table.title == "Operations")
    titles = [(column.group, column.title) for column in problems.columns]
    for expected in (
        ("error against float64", "largest"),
        ("gradient", "gradcheck"),
        ("repeated runs", "distinct results"),
        ("not finite after NaN", "as computed"),
    ):
        assert expected in titles


def test_the_command(tmp_path: Path) -> None:
    asked = ("bench", "metrics", one_layer(tmp_path), "--batch", "2", "--threads", "1", "--rounds", "1")
    result = invoke(*(*asked, "--operations", "forward", "--algorithms", "gemm", "--out", tmp_path / "out"))
    assert result.exit_code == 0, result.output
    for expected in ("gemm", "torch", "passed", "1 of 5", "not finite"):
        assert expected in result.output
    assert len(read_folder(tmp_path / "out").lines) == 2
    assert "did you mean only?" in fail(*asked, "--layer", "onyl")
    assert "leave --layer out" in fail(*asked, "--max-relative-error", "1e-6")
    refused = tmp_path / "refused"
    assert "algorithms has gem; this machine has native" in fail(*asked, "--algorithms", "gem", "--out", refused)
    assert not refused.exists()
