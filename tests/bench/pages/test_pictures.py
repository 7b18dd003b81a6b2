"""Pictures: what is drawn is what was computed, and every picture can stand in a page beside others."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pandas
import pytest
from support.result_folders import MIB, training_layers, write_random_folder

from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.pages import row_pictures as draw
from mucudnn.bench.pages.drawing import SERIES, STYLE, one_line, plain, series_label
from mucudnn.bench.pages.pictures import embedded
from mucudnn.bench.pages.report import Report, report_of
from mucudnn.bench.report.plots import new_figure
from mucudnn.words.results import MicroConfig, counts_in

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("results") / "folder"
    return report_of(read_folder(write_random_folder(path, training_layers(3), limits=(8 * MIB,), rounds=5)))


@pytest.fixture
def rows(report: Report) -> pandas.DataFrame:
    return report.rows


def with_configuration(report: Report, text: str) -> Report:
    return replace(report, rows=report.rows.assign(configuration=text))


def test_speedups_are_drawn_where_they_are(report: Report, rows: pandas.DataFrame) -> None:
    figure = draw.speedups(report)
    assert figure is not None
    for axes, operation in zip(figure.axes, ("forward", "backward_data", "backward_filter"), strict=True):
        expected = rows[(rows["operation"] == operation) & (rows["contestant"] != "torch")]
        points = [line for line in axes.lines if line.get_label()[0] != "_"]
        drawn = np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in points])
        assert sorted(drawn) == sorted(expected["speedup"])
        ends = np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in axes.lines])
        assert set(expected["speedup_low"]) | set(expected["speedup_high"]) <= set(ends)


def test_rates_and_boxes_are_those_of_the_rows(report: Report, rows: pandas.DataFrame) -> None:
    figure = draw.limits(report)
    assert figure is not None
    rates, boxes = figure.axes
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in rates.lines[:-1]])
    assert sorted(drawn) == pytest.approx(sorted(rows["flops_per_s"] / 1e9))
    medians = rows.groupby(["contestant", "kind"])["over_bound"].median()
    ends = np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in boxes.lines])
    assert all(np.isclose(ends, value).any() for value in medians)


def test_the_samples_of_the_longest_operations_are_all_drawn(report: Report, rows: pandas.DataFrame) -> None:
    longest = rows[rows["contestant"] == "torch"].nlargest(1, "time_s")["turns"].iloc[0]
    figure = draw.samples(report)
    assert figure is not None
    first = figure.axes[0]
    drawn = {value for line in first.lines for value in np.asarray(line.get_xdata(), dtype=float)}
    expected = {sample * 1e3 for samples in rows[rows["turns"] == longest]["samples_s"] for sample in samples}
    assert expected <= drawn


def test_bars_are_cut_as_configurations_are(report: Report, rows: pandas.DataFrame) -> None:
    pieces = list(draw.pieces(counts_in("fft 8×2 + gemm 4 + gemm 1×20")))
    assert [name for name, *_ in pieces] == ["fft", "fft", "gemm", "gemm"]
    edges = [(left * 40, right * 40) for _, left, right in pieces]
    assert edges == [(0, 8), (8, 16), (16, 20), (20, 40)]  # twenty equal ones are one piece
    figure = draw.cuts(report)
    assert figure is not None
    subpaths = sum(np.count_nonzero(patch.get_path().codes == 1) for axes in figure.axes for patch in axes.patches)
    ours = rows[rows["contestant"] == "mucudnn"]["configuration"]
    assert subpaths == sum(count if count <= 16 else 1 for text in ours for _, count in counts_in(text))


@pytest.mark.parametrize("text", ["", "torch's own", "gemm", "gemm x", "gemm 2 +", " 3"])
def test_configurations_that_are_none_are_not_drawn(report: Report, text: str) -> None:
    assert draw.cuts(with_configuration(report, text)) is None


def test_configurations_with_huge_counts_are_drawn_at_once(report: Report) -> None:
    assert counts_in("gemm 1×999999999") == ((MicroConfig("gemm", 1), 999999999),)
    assert draw.cuts(with_configuration(report, "gemm 1×999999999")) is not None


def test_without_rows_there_is_no_picture(report: Report) -> None:
    empty = replace(report, rows=report.rows.iloc[:0])
    for picture in (draw.speedups, draw.divided, draw.limits, draw.samples, draw.cuts, draw.memory, draw.tuning):
        assert picture(empty) is None


def test_a_page_holds_the_whole_picture() -> None:
    with matplotlib.rc_context(STYLE):
        figure = new_figure(5, 3, "")
        figure.subplots().plot([1, 2], [3, 4], "o", color=SERIES[0], label=one_line("a <b> & $x$"))
        figure.axes[0].legend()
        kind, _, data = embedded(figure).partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert "a <b> & $x$" in "".join(ElementTree.fromstring(b64decode(data)).itertext())


def test_labels_are_one_short_line() -> None:
    assert plain("a\nb\x1b\x00") == "a b  "
    assert len(plain("x" * 99)) == 34
    assert series_label("mucudnn", "all", 8 * MIB) == "mucudnn, all, 8 MiB"
    assert series_label("mucudnn", "all", float("nan")) == "mucudnn, all, no limit"
    assert series_label("undivided", "undivided", MIB) == "undivided, 1 MiB"
    assert series_label("torch", None, float("nan")) == "torch"
