"""Draws how configurations cut the mini-batch: a bar for each layer and operation, a piece for each micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mucudnn.bench.pages.drawing import (
    SERIES,
    Rectangle,
    draw_rectangles,
    height,
    legend_above,
    one_line,
    plain,
    with_series,
)
from mucudnn.bench.pages.material import Material
from mucudnn.bench.pages.measured import has_problems
from mucudnn.bench.pages.pictures.kinds import MOST_PIECES
from mucudnn.bench.report.plots import label, new_figure
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import Operation
from mucudnn.words.results import MicroConfig, counts_in

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNDIVIDED = "undivided"  # policy of configurations that cut nothing
_GAP = 0.004  # between pieces, of the mini-batch


def draw(material: Material) -> Figure | None:
    """Draw all configurations that were chosen under a policy; ``None``: there are none."""
    from matplotlib.patches import Patch

    rows = material.rows
    if not has_problems(rows):
        return None
    rows = with_series(rows[rows["configuration"].notna() & rows["policy"].notna() & (rows["policy"] != UNDIVIDED)])
    rows = rows.assign(cuts=rows["configuration"].map(_cuts))
    rows = rows[rows["cuts"].map(len) > 0]
    if rows.empty:
        return None
    series = list(dict.fromkeys(rows["series"]))
    names = [str(name) for name in (rows["layer"] if "layer" in rows else rows["kind"])]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    rows = rows.assign(place=[places[name] for name in names])
    operations = [name for name in Operation if (rows["operation"] == name).any()]
    algorithms = Counter(micro_config.algorithm for cuts in rows["cuts"] for micro_config, _ in cuts)
    by_algorithm = {name: SERIES[index % len(SERIES)] for index, (name, _) in enumerate(algorithms.most_common())}
    figure = new_figure(4 + 3 * len(operations), height(len(places), 0.12 + 0.05 * len(series)), "")
    every = figure.subplots(1, len(operations), sharey=True, squeeze=False)[0]
    for axes, operation in zip(every, operations, strict=True):
        _draw_operation(axes, rows[rows["operation"] == operation], series, by_algorithm)
        label(axes, operation.replace("_", " "), "share of the mini-batch, %", "")
    every[0].set_yticks(list(places.values()), [plain(name) for name in places], fontsize=7)
    every[0].set_ylim(len(places) - 0.4, -0.6)
    figure.supxlabel(f"from top to bottom in each layer: {one_line('; '.join(series))}", fontsize=8)
    handles = [Patch(color=colour) for colour in by_algorithm.values()]
    legend_above(figure, handles, [plain(name) for name in by_algorithm])
    return figure


def _cuts(text: str) -> tuple[tuple[MicroConfig, int], ...]:
    """Return the micro-batches of a configuration; none where its text is not understood."""
    try:
        return counts_in(text)
    except InvalidInputError:
        return ()


def _draw_operation(axes: Axes, rows: pandas.DataFrame, series: Sequence[str], by_algorithm: dict[str, str]) -> None:
    pieces: dict[str, list[Rectangle]] = {name: [] for name in by_algorithm}
    for name, place, cuts in zip(rows["series"], rows["place"], rows["cuts"], strict=True):
        upper = place + 0.8 * (series.index(name) / len(series) - 0.5)
        for algorithm, left, right in _pieces(cuts):
            pieces[algorithm].append((100 * left, 100 * (right - _GAP), upper, upper + 0.68 / len(series)))
    for algorithm, rectangles in pieces.items():
        if rectangles:
            draw_rectangles(axes, rectangles, by_algorithm[algorithm])
    axes.set_xlim(0, 100)


def _pieces(cuts: Sequence[tuple[MicroConfig, int]]) -> Iterator[tuple[str, float, float]]:
    """Yield the algorithm of each piece of a bar, and where it begins and ends, from 0 to 1."""
    whole = sum(micro_config.micro_batch_size * count for micro_config, count in cuts)
    done = 0
    for micro_config, count in cuts:
        samples = micro_config.micro_batch_size * count
        parts = count if count <= MOST_PIECES else 1
        for part in range(parts):
            begin, end = done + samples * part / parts, done + samples * (part + 1) / parts
            yield micro_config.algorithm, begin / whole, end / whole
        done += samples
