"""Draws desirable sets: least time against workspace, with the undivided algorithms beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mucudnn.bench.pages.drawing import SERIES, TORCH_COLOUR, legend_above, panels, plain
from mucudnn.bench.pages.material import Material, Subject
from mucudnn.bench.pages.pictures.kinds import MOST_SUBJECTS
from mucudnn.bench.report.plots import label
from mucudnn.words.torch_settings import TORCHS_OWN

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DIVIDED, _UNDIVIDED = SERIES[0], SERIES[1]
_MIB = 2**20


def draw(material: Material) -> Figure | None:
    """Draw the sets of the subjects that take torch longest; ``None``: there are none."""
    every = [subject for subject in material.subjects if len(subject.desirable)][:MOST_SUBJECTS]
    if not every:
        return None
    figure, panel = panels(len(every), 2.6)
    for axes, subject in zip(panel, every, strict=True):
        _draw_subject(axes, subject)
        label(axes, plain(subject.name), "workspace, MiB", "ms")
    legend_above(figure, *panel[0].get_legend_handles_labels())
    return figure


def _draw_subject(axes: Axes, subject: Subject) -> None:
    points = subject.desirable.sort_values("workspace_bytes")
    sizes, times = list(points["workspace_bytes"] / _MIB), list(points["time_s"] * 1e3)
    undivided = subject.undivided
    own = undivided["algorithm"] == TORCHS_OWN
    end = max([*sizes, *(_workspace(undivided) / _MIB)])
    axes.step([*sizes, end], [*times, times[-1]], where="post", color=_DIVIDED, label="desirable set")
    axes.plot(sizes, times, ".", color=_DIVIDED, markersize=4)
    for are_shown, colour, name in ((~own, _UNDIVIDED, "undivided"), (own, TORCH_COLOUR, "torch's own, undivided")):
        shown = undivided[are_shown]
        y = (shown["setup_s"] + shown["step_s"]) * 1e3
        axes.plot(_workspace(shown) / _MIB, y, "s", color=colour, markersize=4, label=name)
    axes.set_ylim(bottom=0)


def _workspace(candidates: pandas.DataFrame) -> pandas.Series[float]:
    return candidates["prepared_bytes"] + candidates["scratch_bytes"]
