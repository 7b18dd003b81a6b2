"""Operator metrics against their definitions, and that each of them notices what it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, product
from math import inf, isnan, nan
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from rich.table import Table
from support.command_line import fail, invoke, one_layer
from torch import Tensor

from mucudnn import ConvProblem, Operation
from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.folders.speedups import overhead_of
from mucudnn.bench.pages.measured import measured
from mucudnn.bench.pages.report import report_of
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.suites.accuracy.layers import (
    MetricsOptions,
    alone,
    benchmark_metrics,
    configuration_of,
    of_few,
    through_module,
)
from mucudnn.bench.suites.accuracy.metrics import (
    MAP_CELLS,
    PASSED,
    cut_down,
    directional_error,
    distinct_results,
    error_map,
    error_norms,
    exact,
    gradcheck,
)
from mucudnn.bench.suites.accuracy.report import draw_error_maps, in_words, metrics_tables
from mucudnn.cli.bench.metrics import parse_configuration
from mucudnn.kernels.contract.reference import relative_l2_error
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.torch_ops.gemm import GEMM
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.timing.timer import WallClock
from mucudnn.measuring.whole_runs import Machine
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.results import MicroConfig

PROBLEM = ConvProblem(Operation.FORWARD, 4, 9, 10, 6, 3, 3, padding=(1, 1))
LAYER = Layer(("layer",), PROBLEM, 2)
FEW = MetricsOptions(algorithms=("gemm", "winograd-2x2", "pointwise"), rounds=3, runs=3)


@pytest.fixture(scope="module", autouse=True)
def no_limits() -> Iterator[None]:
    """Measuring the machine's limits takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MachineLimits, "measured", classmethod(lambda cls, device, dtype: cls(1e9, 1e9)))
        yield


@pytest.fixture(scope="module")
def whole(no_limits: None, tmp_path_factory: pytest.TempPathFactory) -> ResultFolder:
    """Every operation, by torch and by some algorithms."""
    return measure(tmp_path_factory.mktemp("whole") / "out")


def measure(path: Path, choices: MetricsOptions = FEW, layer: Layer = LAYER) -> ResultFolder:
    machine = replace(Machine.current(), clock=WallClock())
    benchmark_metrics("a source", layer, choices, path, machine=machine)
    return read_folder(path)


# Errors


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


def test_a_map_has_the_mean_error_at_each_pixel_and_in_each_cell_of_large_images() -> None:
    torch.manual_seed(0)
    actual, expected = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    brute = (actual.double() - expected.double()).abs().mean(dim=(0, 1))
    assert torch.allclose(torch.tensor(error_map(actual, expected), dtype=torch.float64), brute, rtol=1e-3)
    spot = torch.zeros(1, 1, 2 * MAP_CELLS, 4)
    spot[0, 0, 6, 1] = 8.0
    cells = torch.tensor(error_map(spot, torch.zeros_like(spot)))
    assert cells.shape == (MAP_CELLS, 4)
    assert cells.nonzero().tolist() == [[3, 1]]
    assert cells[3, 1] == 4.0  # two pixels in the cell


def test_results_are_compared_bit_by_bit() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        one = torch.tensor([[1.0, nan, 0.0]], dtype=dtype)
        last_bit = one * (1 + torch.finfo(dtype).eps)
        negative = one.copysign(torch.tensor(-1.0, dtype=dtype))
        assert [distinct_results([one, other, one.clone()]) for other in (one, negative, last_bit)] == [1, 2, 2]


# Gradients


def wrong_by(share: float) -> Callable[[ConvProblem, Operands], Tensor]:
    """Compute in the problem's dtype, wrong by a share."""

    def computed(problem: ConvProblem, operands: Operands) -> Tensor:
        return (exact(problem, operands) * (1 + share)).to(operands.x.dtype)

    return computed


def test_checks_find_a_wrong_operation_and_tell_how_wrong() -> None:
    for operation in Operation:
        problem, _ = cut_down(PROBLEM.with_operation(operation))
        assert gradcheck(problem, wrong_by(0.0)) == PASSED
        assert gradcheck(problem, wrong_by(0.01)).startswith("failed: ")
        for dtype, rounding in (("float64", 1e-13), ("float32", 1e-5), ("bfloat16", 1e-2)):
            problem = replace(PROBLEM, operation=operation, dtype=dtype, memory_format=MemoryFormat.CHANNELS_LAST)
            assert directional_error(problem, wrong_by(0.0)) < rounding
            assert directional_error(problem, wrong_by(0.1)) == pytest.approx(0.1, abs=2 * rounding)


def test_the_layer_cut_down_keeps_what_decides_how_it_is_computed() -> None:
    problem = ConvProblem(Operation.FORWARD, 96, 56, 60, 192, 5, 3, (2, 1), (2, 1), (1, 2), 32)
    small, large = cut_down(problem)
    for one in (small, large):
        assert (one.r, one.s, one.stride, one.padding, one.dilation) == (5, 3, (2, 1), (2, 1), (1, 2))
        assert (one.c, one.k, one.groups, one.dtype) == (6, 6, 2, "float64")
    assert (large.h, large.w) == (56, 60)
    assert small.h < 12
    assert small.p > 1


# Calls


def test_algorithms_and_configurations_compute_the_same_through_a_module_and_alone() -> None:
    parts = [MicroConfig("winograd-2x2", 2), MicroConfig("winograd-2x2", 2), MicroConfig("gemm", 3)]
    for operation, memory_format in product(Operation, MemoryFormat):
        problem = replace(PROBLEM, operation=operation, memory_format=memory_format)
        operands = random_operands(problem, 7)
        names = [algorithm.name for algorithm in algorithms() if algorithm.supports(problem) is None]
        for one in (*(configuration_of(MicroConfig(name, 7)) for name in names), configuration_of(*parts)):
            through = through_module(one, problem, operands)().detach()
            own = operands.with_own_result(operation)
            result = alone(one, problem, own)()
            by_itself = own.written(operation) if result is None else result
            assert relative_l2_error(through, exact(problem, operands)) < 1e-5, one
            assert relative_l2_error(by_itself, through) < (1e-5 if len(one.micro_configs) > 1 else 1e-30), one
    few = of_few(configuration_of(*parts), 2)
    assert few.micro_configs == (MicroConfig("winograd-2x2", 1), MicroConfig("gemm", 1))
    assert of_few(configuration_of(*parts[:2]), 2).micro_configs == (MicroConfig("winograd-2x2", 1),) * 2


# The benchmark


def test_a_folder_has_all_metrics_of_every_operation(whole: ResultFolder) -> None:
    rows = measured(whole)
    assert list(rows["contestant"]) == ["torch", "gemm", "winograd-2x2"] * 3
    assert list(dict.fromkeys(rows["operation"])) == [str(operation) for operation in Operation]
    assert rows["failure"].isna().all()
    assert set(rows["gradcheck"]) == {PASSED}
    assert (rows["distinct_results"] == 1).all()
    for row in rows.to_dict("records"):
        problem = PROBLEM.with_operation(row["operation"])
        size = exact(problem, random_operands(problem, 2)).numel()
        assert 0 < row["error_max"] <= row["error_l2"] <= row["error_l1"] <= size * row["error_max"]
        assert 0 < row["relative_error"] < 1e-5
        assert row["gradient_error"] < 1e-5
        assert np.shape(row["error_map"]) == {Operation.BACKWARD_FILTER: (3, 3)}.get(row["operation"], (9, 10))
        differences = [a - b for a, b in zip(row["samples_s"], row["alone_samples_s"], strict=True)]
        assert row["overhead_s"] == pytest.approx(median(differences))
        assert row["samples_per_s"] == pytest.approx(2 / median(row["samples_s"]))
    assert {one.reason for one in whole.left_out} == {"the filter is 3x3; pointwise takes 1x1"}
    assert measure(whole.path).lines == whole.lines


def test_a_wrong_part_of_a_configuration_is_reported_and_invalid_configurations_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_gemm(monkeypatch, lambda y: y.mul_(2.0))
    asked = (parse_configuration("winograd-2x2 1 + gemm 1"),)
    folder = measure(tmp_path / "out", replace(FORWARD, algorithms=None, configurations=asked))
    row = measured(folder).set_index("contestant").loc[str(asked[0])]
    assert 0.5 < row["relative_error"] < 0.9
    assert row["gradient_error"] > 0.1
    assert str(row["gradcheck"]).startswith("failed: ")
    with pytest.raises(InvalidInputError, match="'gemm 5' has 5 samples, and the layer 2: give one of 2 samples"):
        measure(tmp_path / "other", replace(FEW, configurations=(parse_configuration("gemm 5"),)))
    for text in ("gemm", "gemm x", "gemm 2xx", "gemm 2 +", "", "gemm 0"):
        with pytest.raises(InvalidInputError):
            parse_configuration(text)


def change_gemm(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], object]) -> None:
    """Change what gemm writes in forward."""
    step = type(GEMM).step

    def changed(self: object, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: object) -> None:
        step(self, problem, x, w, y, *rest)  # type: ignore[arg-type]
        change(y)

    monkeypatch.setattr(type(GEMM), "step", changed)


FORWARD = replace(FEW, operations=(Operation.FORWARD,), algorithms=("gemm",))


def gemm_row(folder: ResultFolder) -> dict[str, object]:
    rows = measured(folder).set_index("contestant")
    assert rows.loc["torch", "gradcheck"] == PASSED  # nobody else is blamed
    return dict(rows.loc["gemm"])


def test_a_wrong_algorithm_is_told_by_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_gemm(monkeypatch, lambda y: y.mul_(1.01))
    row = gemm_row(measure(tmp_path / "out", FORWARD))
    assert row["relative_error"] == pytest.approx(0.01, rel=1e-3)
    assert row["gradient_error"] == pytest.approx(0.01, rel=1e-3)
    assert str(row["gradcheck"]).startswith("failed: ")
    assert row["distinct_results"] == 1


def test_what_does_not_repeat_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count(1)
    change_gemm(monkeypatch, lambda y: y[0, 0, 0, 0].fill_(float(next(calls))))
    row = gemm_row(measure(tmp_path / "out", FORWARD))
    assert row["distinct_results"] == row["runs"] == FEW.runs
    assert np.argmax(row["error_map"]) == 0  # where it is wrong


def test_an_algorithm_that_fails_has_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(y: Tensor) -> None:
        raise RuntimeError("no luck\nand a stack trace")

    change_gemm(monkeypatch, fail)
    folder = measure(tmp_path / "out", FORWARD)
    assert gemm_row(folder)["failure"] == "no luck"
    assert isnan(float(str(gemm_row(folder)["overhead_s"])))
    for table in [*metrics_tables(folder)][:2]:
        assert isinstance(table, Table)
        assert "no luck" in table.columns[2]._cells
    assert report_of(folder).tables


def test_overheads_are_of_rounds_that_both_have() -> None:
    assert isnan(overhead_of([], [1.0]).value)
    two = overhead_of([3.0, 5.0, 100.0], [1.0, 2.0])
    assert two.value == 2.5
    assert isnan(two.low)
    many = overhead_of([1.0 + i % 2 for i in range(9)], [1.0] * 9)
    assert (many.low, many.value, many.high) == (0.0, 0.0, 1.0)


# What users see


def test_tables_words_and_picture_of_a_folder(whole: ResultFolder) -> None:
    pytest.importorskip("matplotlib")
    folder, text = whole, in_words(whole)
    assert "left out: pointwise: the filter is 3x3; pointwise takes 1x1" in text
    assert "gradcheck not done" not in text
    maps = [axes for axes in draw_error_maps(folder).axes if axes.get_images()]
    assert [axes.get_title().split("\n")[0] for axes in maps] == ["torch", "gemm", "winograd-2x2"] * 3
    for axes, cells in zip(maps, folder.rows["error_map"], strict=True):
        drawn = np.asarray(axes.get_images()[0].get_array())
        shown = np.asarray(cells) > drawn.min()
        assert np.array_equal(drawn[shown], np.asarray(cells)[shown])
    (problems,) = (table for table in report_of(folder).tables if table.identity == "problems")
    titles = [(column.group, column.title) for column in problems.columns]
    for expected in (
        ("error against float64", "largest"),
        ("gradient", "gradcheck"),
        ("repeated runs", "distinct results"),
        ("overhead of the module, µs", "median"),
    ):
        assert expected in titles


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    csv_file, plot_file = tmp_path / "m.csv", tmp_path / "m.png"
    asked = ("bench", "metrics", one_layer(tmp_path), "--batch", "2", "--threads", "1", "--rounds", "1")
    result = invoke(*(*asked, "--operations", "forward", "--algorithm", "gemm", "--csv", csv_file, "--plot", plot_file))
    assert result.exit_code == 0, result.output
    for expected in ("gemm", "torch", "passed", "1 of 5", "overhead"):
        assert expected in result.output
    heading, *lines = csv_file.read_text().splitlines()
    assert "error_max" in heading
    assert "error_map" not in heading
    assert len(lines) == 2
    assert plot_file.read_bytes().startswith(b"\x89PNG")
    assert "did you mean only?" in fail(*asked, "--layer", "onyl")
    refused = tmp_path / "refused"
    assert "algorithms has gem; this machine has native" in fail(*asked, "--algorithms", "gem", "--out", refused)
    assert not refused.exists()
