"""Pictures of a result folder, embedded in its page or written as files."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.pages import candidate_pictures, row_pictures
from mucudnn.bench.pages.drawing import STYLE
from mucudnn.bench.pages.kinds import KINDS, Kind
from mucudnn.bench.pages.report import Report, report_of
from mucudnn.bench.report.plots import require_matplotlib, save_figure, write_figure
from mucudnn.words.errors import InvalidInputError, UnavailableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Each function returns None if the folder lacks the data for its picture.
DRAW: Mapping[str, Callable[[Report], Figure | None]] = {
    "speedups": row_pictures.speedups,
    "divided": row_pictures.divided,
    "limits": row_pictures.limits,
    "samples": row_pictures.samples,
    "algorithms": candidate_pictures.algorithms,
    "cuts": row_pictures.cuts,
    "desirable": candidate_pictures.desirable,
    "micro-batches": candidate_pictures.micro_batches,
    "budget": candidate_pictures.budget,
    "memory": row_pictures.memory,
    "errors": candidate_pictures.errors,
    "tuning": row_pictures.tuning,
}


def pictures_or_reason(report: Report) -> tuple[list[tuple[Kind, str]], str]:
    """Return the pictures that can be drawn, each with its ``src``, or the reason if matplotlib is not installed."""
    try:
        require_matplotlib()
    except UnavailableError as error:
        return [], str(error)
    from matplotlib import rc_context

    with rc_context(STYLE):
        figures = ((kind, DRAW[name](report)) for name, kind in KINDS.items())
        return [(kind, embedded(figure)) for kind, figure in figures if figure is not None], ""


def embedded(figure: Figure) -> str:
    """Return the figure as SVG in a ``data:`` URL, for an HTML page."""
    stream = BytesIO()
    write_figure(figure, stream, "svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{b64encode(stream.getvalue()).decode()}"


def write_picture(name: str, folder: ResultFolder, path: Path, layers: Sequence[str] = ()) -> None:
    """Draw one picture of a result folder into a PNG or SVG file. layers: the layers to draw; empty for all.

    Raises ``InvalidInputError`` for an unknown layer, and if the folder lacks the data for the picture;
    ``UnavailableError`` if matplotlib is not installed; ``OutputError`` if the file cannot be written.
    """
    require_matplotlib()
    from matplotlib import rc_context

    report = report_of(folder)
    with rc_context(STYLE):
        figure = DRAW[name](report.of_layers(layers) if layers else report)
        if figure is None:
            raise InvalidInputError(
                f"{folder.path} has nothing for a picture of {name}, which needs {KINDS[name].needs}; "
                f"mucudnn report {folder.path} shows what it has"
            )
        save_figure(figure, path)
