"""Pictures: what is drawn is what the folder has, recomputed here; each can stand in a page beside others."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas
import pytest
from numpy.typing import NDArray
from support.result_folders import MIB, training_layers, write_random_folder

from mucudnn.bench.results.pages import pictures
from mucudnn.bench.results.pages.measured import UNDIVIDED, gains, tuned_operations
from mucudnn.bench.results.pages.page import FolderReport, missing_in, report_of
from mucudnn.bench.results.pages.pictures import svg
from mucudnn.bench.results.reading import read_folder
from mucudnn.bench.sources.published import published_gains

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

matplotlib = pytest.importorskip("matplotlib")
GEOMETRY = (64, 54, 64)  # c, h, k of a layer that the authors published


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> FolderReport:
    path = tmp_path_factory.mktemp("results") / "folder"
    problems = ((layer, layer.problem) for layer in training_layers())
    published = next(layer for layer, problem in problems if (problem.c, problem.h, problem.k) == GEOMETRY)
    layers = [*training_layers(2), published]
    return report_of(read_folder(write_random_folder(path, layers, limits=(8 * MIB, None), rounds=5)))


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def ends(lines: Iterable[Line2D]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(line.get_xdata(), dtype=float) for line in lines])


def test_speedups_are_drawn_where_they_are(report: FolderReport) -> None:
    rows = report.rows
    figure = drawn(pictures.speedups(report.rows))
    for axes, operation in zip(figure.axes, ("forward", "backward_data", "backward_filter"), strict=True):
        expected = rows[(rows["operation"] == operation) & (rows["contestant"] != "torch")]
        points = [line for line in axes.lines if line.get_label()[0] != "_"]
        assert sorted(ends(points)) == sorted(expected["speedup"])
        assert set(expected["speedup_low"]) | set(expected["speedup_high"]) <= set(ends(axes.lines))


def test_desirable_sets_are_drawn_with_the_undivided(report: FolderReport) -> None:
    figure = drawn(pictures.desirable(tuned_operations(report.folder)))
    first = tuned_operations(report.folder)[0]
    front, points, undivided, torchs = figure.axes[0].lines
    sizes = list(first.desirable["workspace_bytes"] / MIB)
    assert list(points.get_xdata()) == sizes
    assert list(points.get_ydata()) == list(first.desirable["time_s"] * 1e3)
    assert list(front.get_xdata())[:-1] == sizes
    whole = first.allowed[first.allowed["micro_batch_size"] == first.batch_size].set_index("algorithm")
    time = (first.allowed.groupby("algorithm")["setup_s"].median() + whole["step_s"]) * 1e3
    assert list(undivided.get_ydata()) == pytest.approx([time["fft"], time["gemm"]])  # not "bad": its error bars it
    assert list(torchs.get_ydata()) == pytest.approx([time["native"]])
    for axes in figure.axes:  # nothing undivided is below the line, which says that nothing is faster in its workspace
        _, front, *others = axes.lines
        for x, y in (point for line in others for point in line.get_xydata()):
            within = front.get_ydata()[front.get_xdata() <= x]
            assert within.size == 0 or y >= within.min() * (1 - 1e-9)


def pairs(rows: pandas.DataFrame) -> Iterator[tuple[pandas.DataFrame, pandas.DataFrame]]:
    """Yield the rows of the undivided and of ours by layer and limit, each in one order."""
    rows = rows[rows["contestant"] != "torch"].sort_values("operation")
    for _, of in rows.groupby(["layer", "limit_bytes"], dropna=False, sort=False):
        yield of[of["contestant"] == "undivided"], of[of["contestant"] == "mucudnn"]


def test_gains_are_ratios_of_sums_of_medians(report: FolderReport) -> None:
    found = gains(report.rows)
    expected = [undivided["time_s"].sum() / ours["time_s"].sum() for undivided, ours in pairs(report.rows)]
    assert sorted(found["gain"]) == pytest.approx(sorted(expected))
    assert (found["gain_low"] < found["gain"]).all()
    assert (found["gain"] < found["gain_high"]).all()


def test_the_authors_bars_stand_beside_the_same_geometry(report: FolderReport) -> None:
    figure = drawn(pictures.divided(report.rows))
    ours, published = figure.axes
    assert "measured here" in ours.get_title(loc="left")
    assert "P100" in published.get_title(loc="left")
    bars = published_gains().set_index(["c", "h", "k"]).loc[GEOMETRY]
    widths = [patch.get_width() for patch in published.patches]
    assert widths == [float(bars[limit]) for limit in ("128MiB", "256MiB", "512MiB")] == [1.09, 1.18, 1.0]


def test_layers_that_run_the_undivided_configuration_have_no_bar(report: FolderReport) -> None:
    first = report.rows["layer"].iloc[0]
    is_first = report.rows["layer"] == first
    rows = report.rows.assign(same_as=report.rows["same_as"].mask(is_first, UNDIVIDED))
    figure = drawn(pictures.divided(rows))
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert len(names) == rows["layer"].nunique() - 1
    rows = rows.assign(same_as=UNDIVIDED)
    assert pictures.divided(rows) is None
    assert "same configuration" in dict(missing_in(report.folder, rows))["what dividing gains"]


def test_one_panel_with_many_series_has_its_legend_above_the_axes(report: FolderReport) -> None:
    """And the layout has room for both, which matplotlib would warn of otherwise."""
    names = [f"a long name, the {number}th" for number in range(20)]
    first = report.rows[report.rows["speedup"].notna()][:1]
    figure = drawn(pictures.speedups(pandas.concat([first.assign(policy=name) for name in names])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg(figure)
    (axes,), (legend,) = figure.axes, figure.legends
    assert len(legend.texts) == 20
    assert axes.get_window_extent().y1 <= legend.get_window_extent().y0


def test_the_published_file_is_read_whole() -> None:
    """Rows of the same geometry are one, by their mean."""
    table = published_gains()
    path = Path(__file__).parents[4] / "bench/sources/data/ucudnn_reference.csv"
    lines = [line.split(",") for line in path.read_text().splitlines()[1:]]
    assert len(table) == len({tuple(line[1:7]) for line in lines})
    seven = table[(table["c"] == 512) & (table["h"] == 7)].iloc[0]
    alike = [float(line[7]) for line in lines if line[1:3] == ["512", "7"]]
    assert seven["128MiB"] == pytest.approx(sum(alike) / len(alike))
