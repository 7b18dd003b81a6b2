"""Draws the samples of each algorithm on the whole mini-batch: violins, boxes, and every sample in them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from mucudnn.bench.pages.drawing import draw_samples, name_places, panels, plain, ranked_colours
from mucudnn.bench.pages.material import Material
from mucudnn.bench.pages.pictures.kinds import MOST_SUBJECTS
from mucudnn.bench.report.plots import label

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


def draw(material: Material) -> Figure | None:
    """Draw the algorithms of each subject, the fastest first; ``None``: nothing has samples."""
    found = ((subject, _sampled(subject.undivided)) for subject in material.subjects)
    every = list(islice(((subject, sampled) for subject, sampled in found if len(sampled)), MOST_SUBJECTS))
    if not every:
        return None
    by_name = ranked_colours([name for _, sampled in every for name in sampled["algorithm"]])
    most = max(len(sampled) for _, sampled in every)
    figure, panel = panels(len(every), 1.1 + 0.22 * most)
    for axes, (subject, sampled) in zip(panel, every, strict=True):
        for place, (name, samples) in enumerate(zip(sampled["algorithm"], sampled["step_samples_s"], strict=True)):
            draw_samples(axes, samples, place, by_name[name])
        name_places(axes, list(sampled["algorithm"]))
        label(axes, plain(subject.name), "ms", "")
    return figure


def _sampled(candidates: pandas.DataFrame) -> pandas.DataFrame:
    return candidates[candidates["step_samples_s"].map(len) > 0].sort_values("step_s", kind="stable")
