"""Pictures of a result folder: for its page, which holds them, and as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.pages.drawing import STYLE, embedded
from mucudnn.bench.pages.material import Material
from mucudnn.bench.pages.measured import measured
from mucudnn.bench.pages.pictures import (
    algorithms,
    budget,
    cuts,
    desirable,
    divided,
    errors,
    limits,
    memory,
    micro_batches,
    samples,
    speedups,
    tuning,
)
from mucudnn.bench.pages.pictures.kinds import KINDS
from mucudnn.bench.report.plots import require_matplotlib, save_figure
from mucudnn.words.errors import InvalidInputError, UnavailableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Each returns the figure, or None where the folder has nothing for it.
_DRAW: Mapping[str, Callable[[Material], Figure | None]] = {
    "speedups": speedups.draw,
    "divided": divided.draw,
    "limits": limits.draw,
    "samples": samples.draw,
    "algorithms": algorithms.draw,
    "cuts": cuts.draw,
    "desirable": desirable.draw,
    "micro-batches": micro_batches.draw,
    "budget": budget.draw,
    "memory": memory.draw,
    "errors": errors.draw,
    "tuning": tuning.draw,
}
_TOLD_BY_TABLE = "What was measured of each operation is in the table of operations."


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in the page: what it is called, what it shows, its address, and a text for those who do not see it."""

    title: str
    caption: str
    address: str
    alternative: str


def pictures_or_reason(material: Material) -> tuple[list[Picture], str]:
    """Return all pictures that the material suffices for, or none and the reason."""
    try:
        require_matplotlib()
    except UnavailableError as error:
        return [], str(error)
    from matplotlib import rc_context

    with rc_context(STYLE):
        figures = {name: _DRAW[name](material) for name in KINDS}
        return [
            Picture(kind.title, kind.caption, embedded(figure), f"{kind.title}. {_TOLD_BY_TABLE}")
            for name, kind in KINDS.items()
            if (figure := figures[name]) is not None
        ], ""


def write_picture(name: str, folder: ResultFolder, path: Path, layers: Sequence[str] = ()) -> None:
    """Draw one picture into a PNG or an SVG file. layers: these alone; none: all.

    Raises ``InvalidInputError`` for a layer that the folder does not have, and where it has nothing for this picture,
    with what it would need; ``UnavailableError`` where matplotlib is not installed; ``OutputError`` for a file that
    cannot be.
    """
    require_matplotlib()
    from matplotlib import rc_context

    material = Material.of(folder, measured(folder))
    if layers:
        material = _of_layers(material, layers, folder.path)
    with rc_context(STYLE):
        figure = _DRAW[name](material)
        if figure is None:
            raise InvalidInputError(
                f"{folder.path} has nothing for a picture of {name}, which needs {KINDS[name].needs}; "
                f"mucudnn report {folder.path} shows what it has"
            )
        save_figure(figure, path)


def _of_layers(material: Material, layers: Sequence[str], path: Path) -> Material:
    names = list(dict.fromkeys(material.rows["layer"])) if "layer" in material.rows else []
    if unknown := [name for name in layers if name not in names]:
        raise InvalidInputError(f"{path} has no layer {unknown[0]!r}; it has {', '.join(names) or 'no layers'}")
    return material.of_layers(layers)
