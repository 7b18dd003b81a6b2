"""Pictures: what is drawn is what the folder has, recomputed here; each can stand in a page beside others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas
import pytest
from numpy.typing import NDArray
from support.result_folders import MIB, training_layers, write_random_folder

from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.pages import candidate_pictures, row_pictures
from mucudnn.bench.pages.measured import gains
from mucudnn.bench.pages.report import Report, report_of
from mucudnn.bench.sources.published import GEOMETRY as PUBLISHED_GEOMETRY
from mucudnn.bench.sources.published import published_gains, published_times
from mucudnn.words.results import counts_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

matplotlib = pytest.importorskip("matplotlib")
GEOMETRY = (64, 54, 64)  # c, h, k of a layer that the authors published


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("results") / "folder"
    problems = ((layer, layer.problem) for layer in training_layers())
    published = next(layer for layer, problem in problems if (problem.c, problem.h, problem.k) == GEOMETRY)
    layers = [*training_layers(2), published]
    settings = {"workspace_budget": "1MiB"}
    return report_of(
        read_folder(write_random_folder(path, layers, limits=(8 * MIB, None), rounds=5, settings=settings))
    )


def with_budget(report: Report, budget: object) -> Report:
    header = replace(report.folder.header, settings={"workspace_budget": budget})
    return replace(report, folder=replace(report.folder, header=header))


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def ends(lines: Iterable[Line2D]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in lines])


def test_speedups_are_drawn_where_they_are(report: Report) -> None:
    rows = report.rows
    figure = drawn(row_pictures.speedups(report))
    for axes, operation in zip(figure.axes, ("forward", "backward_data", "backward_filter"), strict=True):
        expected = rows[(rows["operation"] == operation) & (rows["contestant"] != "torch")]
        points = [line for line in axes.lines if line.get_label()[0] != "_"]
        assert sorted(ends(points)) == sorted(expected["speedup"])
        assert set(expected["speedup_low"]) | set(expected["speedup_high"]) <= set(ends(axes.lines))


def test_bars_are_cut_as_configurations_are(report: Report) -> None:
    rows = report.rows
    pieces = list(row_pictures.pieces(counts_in("fft 8×2 + gemm 4 + gemm 1×20")))
    assert [name for name, *_ in pieces] == ["fft", "fft", "gemm", "gemm"]
    edges = [(left * 40, right * 40) for _, left, right in pieces]
    assert edges == [(0, 8), (8, 16), (16, 20), (20, 40)]  # twenty equal ones are one piece
    figure = drawn(row_pictures.cuts(report))
    subpaths = sum(np.count_nonzero(patch.get_path().codes == 1) for axes in figure.axes for patch in axes.patches)
    ours = rows[rows["contestant"] == "mucudnn"]["configuration"]
    assert subpaths == sum(count if count <= 16 else 1 for text in ours for _, count in counts_in(text))


def test_desirable_sets_are_drawn_with_the_undivided(report: Report) -> None:
    figure = drawn(candidate_pictures.desirable(report))
    first = report.subjects[0]
    front, points, undivided, torchs = figure.axes[0].lines
    sizes = list(first.desirable["workspace_bytes"] / MIB)
    assert list(points.get_xdata()) == sizes
    assert list(points.get_ydata()) == list(first.desirable["time_s"] * 1e3)
    assert list(front.get_xdata())[:-1] == sizes
    whole = first.measured[first.measured["micro_batch_size"] == first.batch_size].set_index("algorithm")
    time = (first.measured.groupby("algorithm")["setup_s"].median() + whole["step_s"]) * 1e3
    assert list(undivided.get_ydata()) == pytest.approx([time["fft"], time["gemm"]])  # not "bad": its error bars it
    assert list(torchs.get_ydata()) == pytest.approx([time["native"]])
    for axes in figure.axes:  # nothing undivided is below the line, which says that nothing is faster in its workspace
        _, front, *others = axes.lines
        for x, y in (point for line in others for point in line.get_xydata()):
            within = front.get_ydata()[front.get_xdata() <= x]
            assert within.size == 0 or y >= within.min() * (1 - 1e-9)


def test_times_of_a_sample_are_drawn_by_micro_batch_size(report: Report) -> None:
    figure = drawn(candidate_pictures.micro_batches(report))
    first = report.subjects[0]
    assert {line.get_label() for line in figure.axes[0].lines} == {"native", "gemm", "fft"}
    for line in figure.axes[0].lines:
        of = first.measured[first.measured["algorithm"] == line.get_label()]
        assert list(line.get_xdata()) == list(of["micro_batch_size"])
        assert list(line.get_ydata()) == pytest.approx(list(of["step_s"] / of["micro_batch_size"] * 1e3))


def test_every_sample_of_an_algorithm_is_drawn(report: Report) -> None:
    figure = drawn(candidate_pictures.algorithms(report))
    first = report.subjects[0]
    whole = first.measured[first.measured["micro_batch_size"] == first.batch_size]
    expected = {s * 1e3 for row in whole.to_dict("records") if row["algorithm"] != "bad" for s in row["step_samples_s"]}
    assert expected <= set(ends(figure.axes[0].lines))
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == list(whole[whole["algorithm"] != "bad"].sort_values("step_s")["algorithm"])


def test_the_largest_error_of_each_algorithm_is_drawn(report: Report) -> None:
    figure = drawn(candidate_pictures.errors(report))
    largest = report.folder.candidates.measured.groupby(["subject", "algorithm"])["relative_error"].max()
    assert set(largest) <= set(ends(figure.axes[0].lines))
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == list(largest.groupby("algorithm").median().sort_values().index)


def test_segments_are_those_of_the_rows(report: Report) -> None:
    """And the curve begins where each problem has its least workspace."""
    figure = drawn(candidate_pictures.budget(report))
    curve, segments = figure.axes
    ours = report.rows[report.rows["contestant"] == "mucudnn"]
    first = ours.drop_duplicates(["layer", "operation"])["workspace_bytes"] / MIB
    widths = [patch.get_width() for patch in segments.patches[: len(first)]]
    assert sorted(widths) == pytest.approx(sorted(first))
    least = report.folder.candidates.desirable.groupby("subject")["workspace_bytes"].min().sum() / MIB
    assert curve.lines[0].get_xdata()[0] == pytest.approx(least)
    assert list(curve.lines[1].get_xdata()) == [1.0]  # the budget
    times = list(curve.lines[0].get_ydata())
    assert times == sorted(times, reverse=True)


def test_of_several_budgets_the_smallest_that_suffices_is_drawn(report: Report) -> None:
    """As recipes have them: a row for each budget, whose limit is the budget."""
    for failed, expected in ((False, 8 * MIB), (True, 64 * MIB)):
        rows = report.rows.replace({"contestant": {"mucudnn": "mucudnn-wd"}})
        is_first = rows["limit_bytes"] == 8 * MIB
        rows["limit_bytes"] = rows["limit_bytes"].where(is_first | (rows["contestant"] != "mucudnn-wd"), 64 * MIB)
        if failed:
            rows["configuration"] = rows["configuration"].mask(is_first, None)
        figure = drawn(candidate_pictures.budget(replace(with_budget(report, [64 * MIB, 8 * MIB]), rows=rows)))
        curve, segments = figure.axes
        assert list(curve.lines[1].get_xdata()) == [expected / MIB]
        ours = rows[(rows["contestant"] == "mucudnn-wd") & (rows["limit_bytes"] == expected)]
        widths = [patch.get_width() for patch in segments.patches[: len(ours)]]
        assert sorted(widths) == pytest.approx(sorted(ours["workspace_bytes"] / MIB))


def test_memory_is_that_of_the_problems(report: Report) -> None:
    found = row_pictures.memory_of_layers(report.rows)
    for row in found.to_dict("records"):
        of = report.rows[(report.rows["layer"] == row["layer"]) & report.rows["workspace_bytes"].notna()]
        one = of.iloc[0]
        height = (one["h"] + 2 * one["pad_h"] - one["r"]) // one["stride_h"] + 1
        width = (one["w"] + 2 * one["pad_w"] - one["s"]) // one["stride_w"] + 1
        assert row["activation_bytes"] == 4 * one["batch_size"] * one["k"] * height * width
        assert row["parameter_bytes"] == 4 * one["k"] * one["c"] * one["r"] * one["s"]
        is_unlimited = "no limit" in row["series"]
        same = of[(of["contestant"] == row["series"].split(",")[0]) & (of["limit_bytes"].isna() == is_unlimited)]
        assert row["workspace_bytes"] == same["workspace_bytes"].max()
    assert len(found) == 3 * 4
    assert row_pictures.memory(report) is not None


def pairs(rows: pandas.DataFrame) -> Iterator[tuple[pandas.DataFrame, pandas.DataFrame]]:
    """Yield the rows of the undivided and of ours by layer and limit, each in one order."""
    rows = rows[rows["contestant"] != "torch"].sort_values("operation")
    for _, of in rows.groupby(["layer", "limit_bytes"], dropna=False, sort=False):
        yield of[of["contestant"] == "undivided"], of[of["contestant"] == "mucudnn"]


def test_gains_are_ratios_of_sums_of_medians(report: Report) -> None:
    found = gains(report.rows)
    expected = [undivided["time_s"].sum() / ours["time_s"].sum() for undivided, ours in pairs(report.rows)]
    assert sorted(found["gain"]) == pytest.approx(sorted(expected))
    assert (found["gain_low"] < found["gain"]).all()
    assert (found["gain"] < found["gain_high"]).all()


def test_the_authors_bars_stand_beside_the_same_geometry(report: Report) -> None:
    figure = drawn(row_pictures.divided(report))
    ours, published = figure.axes
    assert "measured here" in ours.get_title(loc="left")
    assert "P100" in published.get_title(loc="left")
    bars = published_gains().set_index(["c", "h", "k"]).loc[GEOMETRY]
    widths = [patch.get_width() for patch in published.patches]
    assert widths == [float(bars[limit]) for limit in ("128MiB", "256MiB", "512MiB")] == [1.09, 1.18, 1.0]


def test_the_published_file_is_read_whole() -> None:
    """Rows of the same geometry are one, by their mean."""
    table = published_gains()
    path = Path(__file__).parents[3] / "bench/sources/data/ucudnn_reference.csv"
    lines = [line.split(",") for line in path.read_text().splitlines()[1:]]
    assert len(table) == len({tuple(line[1:7]) for line in lines})
    seven = table[(table["c"] == 512) & (table["h"] == 7)].iloc[0]
    alike = [float(line[7]) for line in lines if line[1:3] == ["512", "7"]]
    assert seven["128MiB"] == pytest.approx(sum(alike) / len(alike))


def test_published_inference_is_beside_forward_rows_alone() -> None:
    path = Path(__file__).parents[3] / "bench/sources/data/deepbench_inference.csv"
    lines = [line.split(",") for line in path.read_text().splitlines()[1:]]
    assert {Path(line[0]).suffix for line in lines} == {".xlsx"}  # its file in DeepBench's repository
    found, training = published_times(["forward", "forward"]), published_times(["forward", "backward_data"])
    assert {f"{line[1]} {line[2]}" for line in lines}.isdisjoint(training["machine"])
    assert len(found) == len(training) + len({tuple(line[1:14]) for line in lines})
    key = dict(zip(PUBLISHED_GEOMETRY, map(int, lines[0][3:14]), strict=True))
    (row,) = found[(found[list(key)] == list(key.values())).all(axis=1) & (found["machine"] == "TitanXp int8")].to_dict(
        "records"
    )
    assert row["time_s"] == pytest.approx(float(lines[0][14]) / 1e3)
