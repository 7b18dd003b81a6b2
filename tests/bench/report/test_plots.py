"""Plots show what they are given, with units, and say how to get matplotlib."""

from __future__ import annotations

import subprocess
import sys

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from support.problems.made_up_sweeps import layer, measured_ms, powers, sweep

from mucudnn.bench.analyses.batch_report import draw_sweep
from mucudnn.bench.analyses.batch_sizes import BatchSweep

UP_TO = 24


def steep() -> BatchSweep:
    """Torch takes 1 ms a sample, but from batch 16 on 2 ms, with a megabyte each."""
    native = powers("native", UP_TO, lambda n: 2 * n if n >= 16 else n, scratch_bytes=2**20)
    return sweep(layer(native, UP_TO), up_to=UP_TO, limit_bytes=2**22)


def smooth(problems: int) -> BatchSweep:
    return sweep(*(layer(powers("native", UP_TO, float), UP_TO) for _ in range(problems)), up_to=UP_TO)


def line(axes: Axes, start: str) -> list[tuple[float, float]]:
    (found,) = (line for line in axes.get_lines() if str(line.get_label()).startswith(start))
    return [(float(x), float(y)) for x, y in found.get_xydata()]  # type: ignore[union-attr]


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)


def test_curves_are_per_sample_in_milliseconds_and_mebibytes() -> None:
    time, workspace, _ = draw_sweep(steep()).axes
    assert line(time, "PyTorch") == [(n, pytest.approx(2 if n == 16 else 1)) for n in (1, 2, 4, 8, 16)]
    assert line(workspace, "PyTorch") == [(n, pytest.approx(1 / n)) for n in (1, 2, 4, 8, 16)]
    assert line(workspace, "workspace limit")[:2] == [(1, 4), (2, 2)]
    assert len(line(time, "divided")) == UP_TO
    assert (time.get_ylabel(), workspace.get_ylabel()) == ("ms per sample", "MiB per sample")
    assert {axes.get_xlabel() for axes in (time, workspace)} == {"batch size"}


def test_cliffs_are_ringed_and_their_cut_is_named() -> None:
    figure = draw_sweep(steep())
    rings = [line for line in figure.axes[0].get_lines() if line.get_markerfacecolor() == "none"]
    assert {(float(ring.get_xdata()[0]), float(ring.get_ydata()[0])) for ring in rings} == {(16.0, 2.0)}  # type: ignore[index,arg-type]
    assert "16 runs as native 8×2, 2.00×" in " ".join(texts(figure).split())
    assert texts(draw_sweep(smooth(1))) == "no cliffs"


def test_the_problems_whose_cliffs_cost_most_are_shown() -> None:
    costs = [1.5, 4.0, 1.0, 2.0, 3.0]
    rows = [
        layer([measured_ms("native", 1, 1), measured_ms("native", 2, 2 * cost)], 2, name=f"conv{index}")
        for index, cost in enumerate(costs)
    ]
    titles = [axes.get_title(loc="left") for axes in draw_sweep(sweep(*rows, up_to=2)).axes[::3]]
    assert titles == [
        f"{name}: time" for name in ("all convolutions", "conv1 forward", "conv4 forward", "conv3 forward")
    ]


def test_drawing_leaves_the_global_state_of_matplotlib_alone() -> None:
    draw = "import sys; from mucudnn.bench.report.plots import new_figure; new_figure(2, 2, 'a').add_subplot()"
    code = f"{draw}; print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
