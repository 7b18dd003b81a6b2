"""Draws what a workspace budget buys, solved again from the stored desirable sets, and who got how much of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mucudnn.bench.pages.drawing import SERIES, plain
from mucudnn.bench.pages.material import Material, Subject
from mucudnn.bench.report.budget_plot import draw_curve, draw_segments
from mucudnn.bench.report.plots import new_figure
from mucudnn.solver.curve import next_faster, time_curve
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import Configuration, counts_in
from mucudnn.words.units import parse_bytes

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_OURS = ("mucudnn-wd", "mucudnn")  # of several budgets, and of the only one


def draw(material: Material) -> Figure | None:
    """Draw the budget of the run, of several the smallest; ``None``: it had none, or desirable sets are missing."""
    budget = budget_of(material)
    subjects = [] if budget is None else _shared(material, budget)
    if budget is None or not subjects:
        return None
    options = {place: _options(subject) for place, subject in enumerate(subjects)}
    if not all(options.values()):
        return None
    rows = [_ours(subject, budget).iloc[0] for subject in subjects]
    counts = {place: int(row["count"]) for place, row in enumerate(rows)}
    smallest = sum(min(c.workspace_bytes for c in found) for found in options.values())
    curve = time_curve(options, counts, budgets=[max(budget, smallest)])
    here = next(point for point in curve.points if point.budget_bytes == max(budget, smallest))
    figure = new_figure(13, max(4.0, 1.5 + 0.18 * min(len(subjects), 24)), "")
    left, right = figure.subplots(1, 2)
    draw_curve(left, curve, (here.budget_bytes, here.time_s), (SERIES[0], SERIES[4]))
    segments = [_segment(*each) for each in zip(subjects, rows, options.values(), strict=True)]
    draw_segments(right, segments, (SERIES[0], SERIES[1]))
    return figure


def budget_of(material: Material) -> int | None:
    """Return the workspace budget of the run in bytes, of several the smallest; ``None``: it had none.

    So it is for what is no size, and for a smallest budget that did not suffice.
    """
    given = material.settings.get("workspace_budget")
    try:
        sizes = [parse_bytes(one) for one in (given if isinstance(given, list) else [given]) if one is not None]
    except InvalidInputError:
        return None
    return min((size for size in sizes if size is not None and _suffices(material, size)), default=None)


def _suffices(material: Material, budget: int) -> bool:
    return any(len(_ours(subject, budget)) for subject in material.subjects)


def _shared(material: Material, budget: int) -> list[Subject]:
    """Return the subjects that have a segment."""
    return [subject for subject in material.subjects if len(_ours(subject, budget))]


def _ours(subject: Subject, budget: int) -> pandas.DataFrame:
    """Return the rows of this budget; of a run with one budget alone, the rows name none."""
    rows = subject.rows[subject.rows["contestant"].isin(_OURS) & subject.rows["configuration"].notna()]
    divided = rows[rows["contestant"] == _OURS[0]]
    return divided[divided["limit_bytes"] == budget] if len(divided) else rows


def _options(subject: Subject) -> list[Configuration]:
    """Return the desirable set as the solver has it; none where a text is no configuration."""
    points = zip(*(subject.desirable[name] for name in ("configuration", "time_s", "workspace_bytes")), strict=True)
    try:
        return [
            Configuration(tuple(of for of, count in counts_in(text) for _ in range(count)), time_s, int(workspace))
            for text, time_s, workspace in points
        ]
    except InvalidInputError:
        return []


def _segment(subject: Subject, row: pandas.Series[Any], options: list[Configuration]) -> tuple[str, int, int]:
    """Return name, bytes, and what the next faster needs more.

    What ran may not be in the desirable set: whole runs had their say. Then it is taken to be as fast as its median.
    """
    workspace = 0 if row["workspace_bytes"] != row["workspace_bytes"] else int(row["workspace_bytes"])
    predicted = {str(c): c.time_s for c in options}
    chosen = Configuration((), predicted.get(str(row["configuration"]), float(row["time_s"])), workspace)
    faster = next_faster(options, chosen)
    extra = 0 if faster is None else max(faster.workspace_bytes - workspace, 0)
    return plain(subject.name), workspace, extra
