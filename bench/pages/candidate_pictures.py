"""Pictures of the candidates of tuning, each an algorithm timed at one micro-batch size.

Each function returns ``None`` if the report has no candidates for its picture.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas

from mucudnn.bench.pages.drawing import (
    MARKERS,
    SERIES,
    TORCH_COLOUR,
    beside,
    colours,
    draw_samples,
    legend_above,
    named_rows,
    panels,
    plain,
)
from mucudnn.bench.pages.kinds import MOST_SUBJECTS
from mucudnn.bench.pages.report import Report, Subject
from mucudnn.bench.report.plots import batch_axis, draw_curve, draw_segments, label, new_figure, ratio_axis
from mucudnn.solver.curve import next_faster, time_curve
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import Configuration, counts_in
from mucudnn.words.torch_settings import TORCHS_OWN
from mucudnn.words.units import parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 2**20
_OURS = ("mucudnn-wd", "mucudnn")  # the contestants of runs with several workspace budgets, and with one


def algorithms(report: Report) -> Figure | None:
    """Draw all time samples of each algorithm on the whole mini-batch, fastest algorithm first."""

    def sampled(subject: Subject) -> pandas.DataFrame:
        found = subject.undivided
        return found[found["step_samples_s"].map(len) > 0].sort_values("step_s", kind="stable")

    every = _longest(report, lambda subject: len(sampled(subject)) > 0)
    if not every:
        return None
    frames = [sampled(subject) for subject in every]
    by_name = colours(name for frame in frames for name in frame["algorithm"])
    figure, panel = panels(len(every), 1.1 + 0.22 * max(map(len, frames)))
    for axes, subject, of in zip(panel, every, frames, strict=True):
        draw_samples(axes, zip(of["algorithm"], of["step_samples_s"], of["algorithm"].map(by_name), strict=True))
        label(axes, plain(subject.name), "ms", "")
    return figure


def _longest(report: Report, is_drawn: Callable[[Subject], bool]) -> list[Subject]:
    """Return the drawable subjects on which torch takes longest, at most ``MOST_SUBJECTS`` of them."""
    return list(islice(filter(is_drawn, report.subjects), MOST_SUBJECTS))


def desirable(report: Report) -> Figure | None:
    """Draw each desirable set (time against workspace), and the undivided algorithms as points."""
    every = _longest(report, lambda subject: len(subject.desirable) > 0)
    if not every:
        return None
    figure, panel = panels(len(every), 2.6)
    for axes, subject in zip(panel, every, strict=True):
        _draw_desirable(axes, subject)
        label(axes, plain(subject.name), "workspace, MiB", "ms")
    legend_above(figure)
    return figure


def _draw_desirable(axes: Axes, subject: Subject) -> None:
    points, undivided = subject.desirable.sort_values("workspace_bytes"), undivided_costs(subject)
    sizes, times = list(points["workspace_bytes"] / _MIB), list(points["time_s"] * 1e3)
    end = max([*sizes, *undivided["workspace_bytes"] / _MIB])
    axes.step([*sizes, end], [*times, times[-1]], where="post", color=SERIES[0], label="desirable set")
    axes.plot(sizes, times, ".", color=SERIES[0], markersize=4)
    own = undivided["algorithm"] == TORCHS_OWN
    for of, colour, name in ((~own, SERIES[1], "undivided"), (own, TORCH_COLOUR, "PyTorch, undivided")):
        x, y = undivided["workspace_bytes"][of] / _MIB, undivided["time_s"][of] * 1e3
        axes.plot(x, y, "s", color=colour, markersize=4, label=name)
    axes.set_ylim(bottom=0)


def undivided_costs(subject: Subject) -> pandas.DataFrame:
    """Return ``algorithm``, ``time_s`` and ``workspace_bytes`` of each algorithm run on the whole mini-batch.

    The costs follow the solver's model (``solver.costs.pool``), which pools an algorithm's setup time and prepared
    bytes over all its micro-batch sizes. Otherwise a point could lie below the desirable set.
    """
    every, whole = subject.allowed.groupby("algorithm"), subject.undivided
    return pandas.DataFrame(
        {
            "algorithm": whole["algorithm"],
            "time_s": whole["algorithm"].map(every["setup_s"].median()) + whole["step_s"],
            "workspace_bytes": whole["algorithm"].map(every["prepared_bytes"].max()) + whole["scratch_bytes"],
        }
    )


def micro_batches(report: Report) -> Figure | None:
    """Draw the time per sample in ms against the micro-batch size, with a line for each algorithm."""
    every = _longest(report, lambda subject: subject.allowed["micro_batch_size"].nunique() > 1)
    if not every:
        return None
    by_name = colours(name for subject in every for name in subject.allowed["algorithm"])
    markers = {name: MARKERS[index % len(MARKERS)] for index, name in enumerate(by_name)}
    figure, panel = panels(len(every), 2.6)
    for axes, subject in zip(panel, every, strict=True):
        for name, of in subject.allowed.sort_values("micro_batch_size").groupby("algorithm", sort=False):
            style: dict[str, Any] = {"marker": markers[str(name)], "color": by_name[str(name)], "markersize": 3}
            sizes = of["micro_batch_size"]
            axes.plot(sizes, of["step_s"] / sizes * 1e3, label=plain(str(name)), **style)
        ratio_axis(axes)
        batch_axis(axes, subject.batch_size)
        label(axes, plain(subject.name), "micro-batch size", "ms per sample")
    legend_above(figure)
    return figure


def errors(report: Report) -> Figure | None:
    """Draw the relative error of each algorithm against float64, most accurate algorithm first."""
    known = report.folder.candidates.measured.dropna(subset=["relative_error"])
    known = known.assign(relative_error=known["relative_error"].astype(float))
    known = known[known["relative_error"] > 0]
    if known.empty:
        return None
    largest = known.groupby(["subject", "algorithm"], sort=False, as_index=False).agg(
        relative_error=("relative_error", "max"), is_allowed=("is_allowed", "min"), operation=("operation", "first")
    )
    medians = largest.groupby("algorithm")["relative_error"].median().sort_values(kind="stable")
    operations = list(dict.fromkeys(largest["operation"]))
    figure, (axes,) = named_rows([str(name) for name in medians.index], 0.3, 9)
    for place, (name, median) in enumerate(medians.items()):
        for index, operation in enumerate(operations):
            of = largest[(largest["algorithm"] == name) & (largest["operation"] == operation)]
            y = np.full(len(of), beside(place, index, len(operations)))
            barred, found = ~of["is_allowed"].astype(bool).to_numpy(), of["relative_error"].to_numpy()
            style: dict[str, Any] = {"color": SERIES[index], "markersize": 3.5, "linestyle": "none"}
            axes.plot(found[~barred], y[~barred], MARKERS[index], label=operation.replace("_", " "), **style)
            axes.plot(found[barred], y[barred], "x", **style)
        axes.plot([median, median], [place - 0.3, place + 0.3], color=SERIES[-1], linewidth=1.5)
    axes.set_xscale("log")
    label(axes, "", "relative L2 error against float64", "")
    legend_above(figure)
    return figure


def budget(report: Report) -> Figure | None:
    """Draw a network's time against its workspace budget, and the share of the budget that each problem gets.

    The division is solved again from the stored desirable sets. If the run had several budgets, the smallest feasible
    one is drawn.
    """
    size = budget_of(report)
    if size is None:
        return None
    ours = {
        place: (subject, found) for place, subject in enumerate(report.subjects) if len(found := _ours(subject, size))
    }
    options = {place: _options(subject) for place, (subject, _) in ours.items()}
    if not all(options.values()):
        return None
    counts = {place: int(found["count"].iloc[0]) for place, (_, found) in ours.items()}
    size = max(size, sum(min(c.workspace_bytes for c in found) for found in options.values()))
    curve = time_curve(options, counts, budgets=[size])
    here = next(point for point in curve.points if point.budget_bytes == size)
    figure = new_figure(13, max(4.0, 1.5 + 0.18 * min(len(ours), 24)), "")
    left, right = figure.subplots(1, 2)
    draw_curve(left, curve, (here.budget_bytes, here.time_s), (SERIES[0], SERIES[4]))
    segments = [_segment(subject, found.iloc[0], options[place]) for place, (subject, found) in ours.items()]
    draw_segments(right, segments, (SERIES[0], SERIES[1]))
    return figure


def budget_of(report: Report) -> int | None:
    """Return the smallest feasible workspace budget of the run, in bytes; None if no budget was feasible."""
    given = report.folder.header.settings.get("workspace_budget")
    try:
        sizes = [parse_bytes(one) for one in (given if isinstance(given, list) else [given]) if one is not None]
    except InvalidInputError:
        return None
    sufficed = (size for size in sizes if size is not None and any(len(_ours(one, size)) for one in report.subjects))
    return min(sufficed, default=None)


def _ours(subject: Subject, budget: int) -> pandas.DataFrame:
    """Return mucudnn's rows under this workspace budget. In a run with one budget, rows have no budget column."""
    rows = subject.rows[subject.rows["contestant"].isin(_OURS) & subject.rows["configuration"].notna()]
    divided = rows[rows["contestant"] == _OURS[0]]
    return divided[divided["limit_bytes"] == budget] if len(divided) else rows


def _options(subject: Subject) -> list[Configuration]:
    """Parse the subject's desirable set as configurations; return an empty list if one of them is invalid."""
    points = subject.desirable[["configuration", "time_s", "workspace_bytes"]].itertuples(index=False, name=None)
    try:
        return [
            Configuration(tuple(of for of, count in counts_in(text) for _ in range(count)), time_s, int(workspace))
            for text, time_s, workspace in points
        ]
    except InvalidInputError:
        return []


def _segment(subject: Subject, row: pandas.Series[Any], options: list[Configuration]) -> tuple[str, int, int]:
    """Return a problem's name, its workspace, and the additional workspace of the next faster configuration, in bytes.

    The chosen configuration can be outside the desirable set, because whole runs are timed before the choice; its time
    is then the median of its samples.
    """
    workspace = 0 if pandas.isna(row["workspace_bytes"]) else int(row["workspace_bytes"])
    predicted = {str(c): c.time_s for c in options}
    chosen = Configuration((), predicted.get(str(row["configuration"]), float(row["time_s"])), workspace)
    faster = next_faster(options, chosen)
    return plain(subject.name), workspace, 0 if faster is None else max(faster.workspace_bytes - workspace, 0)
