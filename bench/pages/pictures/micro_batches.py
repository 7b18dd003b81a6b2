"""Draws the time of a sample against the micro-batch size, a line for each algorithm."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from mucudnn.bench.pages.drawing import MARKERS, legend_above, panels, plain, ranked_colours
from mucudnn.bench.pages.material import Material, Subject
from mucudnn.bench.pages.pictures.kinds import MOST_SUBJECTS
from mucudnn.bench.report.plots import batch_axis, label, ratio_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(material: Material) -> Figure | None:
    """Draw the subjects that take torch longest; ``None``: nothing was measured at more than one size."""
    found = (subject for subject in material.subjects if subject.allowed["micro_batch_size"].nunique() > 1)
    every = list(islice(found, MOST_SUBJECTS))
    if not every:
        return None
    names = [name for subject in every for name in subject.allowed["algorithm"]]
    by_name = ranked_colours(names)
    figure, panel = panels(len(every), 2.6)
    for axes, subject in zip(panel, every, strict=True):
        _draw_subject(axes, subject, by_name)
        label(axes, plain(subject.name), "micro-batch size", "ms per sample")
    handles = {text: one for axes in panel for one, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    legend_above(figure, list(handles.values()), list(handles))
    return figure


def _draw_subject(axes: Axes, subject: Subject, by_name: dict[str, str]) -> None:
    for index, (name, colour) in enumerate(by_name.items()):
        of = subject.allowed[subject.allowed["algorithm"] == name].sort_values("micro_batch_size")
        if len(of):
            per_sample = of["step_s"] / of["micro_batch_size"] * 1e3
            marker = MARKERS[index % len(MARKERS)]
            axes.plot(of["micro_batch_size"], per_sample, marker=marker, color=colour, markersize=3, label=plain(name))
    ratio_axis(axes)
    batch_axis(axes, subject.batch_size)
