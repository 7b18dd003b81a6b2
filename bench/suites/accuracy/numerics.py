"""Numerical behavior of each algorithm: propagation of NaN and Inf, range, and small values next to large ones.

Each algorithm computes small convolutions of images chosen to reveal differences from torch. The *image* is x, or dy
for BACKWARD_DATA. The *pixel* is one element of the image's first sample: in the middle, or for BACKWARD_FILTER in the
last corner, which some filter elements never touch. The *results* are the elements that the operation writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import frexp, inf, nan
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import write_missing
from mucudnn.bench.report.tables import new_table
from mucudnn.bench.suites.accuracy.layers import configuration_of
from mucudnn.bench.suites.accuracy.metrics import exact
from mucudnn.kernels.contract.buffers import torch_dtype
from mucudnn.kernels.contract.reference import relative_l2_error
from mucudnn.kernels.registry import algorithm, algorithms
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.whole_runs import run_whole
from mucudnn.running.environment import current_environment
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress, silent
from mucudnn.words.results import MicroConfig
from mucudnn.words.torch_settings import TORCHS_OWN

SAMPLES = 2  # With 1 sample, torch selects another backend for such small images.
OUTLIER = 1e6
_CHANNELS = 8
_OF_RANGE = 64  # In half precision the outlier is the largest number / 64, which keeps sums finite.
_SMALL = 8  # The subnormals are the smallest normal number / 8, which leaves them some bits.
_COLUMNS = ("operation", "filter", "image", "dtype")


def benchmark_numerics(operations: Sequence[Operation], dtype: str, out: Path, *, progress: Progress = silent) -> None:
    """Measure the numerical behavior of each CPU algorithm on the operations it supports in this dtype.

    Rows are written into the folder ``out``; rows that it already has are not measured again. Raises the errors of
    ``open_folder``.
    """
    cases = [case for operation in operations for case in _cases(operation, dtype)]
    settings = {"operations": list(operations), "dtype": dtype, "samples": SAMPLES}
    environment = current_environment()
    header = Header(*("numerics", "small images", settings, environment), _COLUMNS, wanted=len(cases), is_timed=False)
    wanted = {tuple(_subject(problem).values()): partial(_rows, problem, names) for problem, names in cases}
    write_missing(out, header, wanted, progress)


def _cases(operation: Operation, dtype: str) -> Iterator[tuple[ConvProblem, list[str]]]:
    """Yield problems, each with the names of the algorithms to measure on it.

    Torch's own algorithm is measured on every problem, any other algorithm on the first problem that it supports.
    """
    rest = [candidate for candidate in algorithms() if candidate.name != TORCHS_OWN]
    for problem in geometries(operation, dtype):
        supporting = [candidate for candidate in rest if candidate.supports(problem) is None]
        if supporting:
            yield problem, [TORCHS_OWN, *(candidate.name for candidate in supporting)]
        rest = [candidate for candidate in rest if candidate not in supporting]


def geometries(operation: Operation, dtype: str = "float32") -> tuple[ConvProblem, ...]:
    """Return the problems to measure on: one for most algorithms, then others for larger filters and images."""
    usual = ConvProblem(operation, c=_CHANNELS, h=16, w=16, k=_CHANNELS, r=3, s=3, padding=(1, 1), dtype=dtype)
    return usual, replace(usual, r=5, s=5, padding=(2, 2)), replace(usual, h=40, w=40)


def _subject(problem: ConvProblem) -> Subject:
    geometry = f"{problem.r}x{problem.s}", f"{problem.h}x{problem.w}"
    return dict(zip(_COLUMNS, (str(problem.operation), *geometry, problem.dtype), strict=True))


def _rows(problem: ConvProblem, names: Sequence[str], subject: Subject, progress: Progress) -> Iterator[Row]:
    for done, name in enumerate(names):
        progress(f"{name}, {problem}", done / len(names))
        yield measure(name, problem)


def measure(name: str, problem: ConvProblem) -> Row:
    """Measure the numerical behavior of an algorithm on ``SAMPLES`` samples of a problem; return it as a row.

    One element of the images, the pixel, is set to special values. Columns of the row: local: as the algorithm declares
    it. nan_results, inf_results: number of results that are not finite if the pixel is NaN or Inf. largest: the largest
    power of two up to which the elements of a random image give finite results. outlier_error: the largest error of the
    results that do not depend on the pixel, if it is ``OUTLIER`` among ones. keeps_subnormals: whether an image of
    subnormals gives correct results instead of zeros. relative_error: L2, against float64, for normal random numbers.
    """
    operands, configuration = random_operands(problem, SAMPLES), configuration_of(MicroConfig(name, SAMPLES))

    def run(on: Operands) -> Tensor:
        return run_whole(problem, configuration, on)

    more = {
        "local": algorithm(name).is_local(problem),
        "nan_results": _not_finite(run(with_pixel(problem, operands, nan))),
        "inf_results": _not_finite(run(with_pixel(problem, operands, inf))),
        "largest": _largest(problem, operands, run),
        "outlier_error": _outlier_error(problem, operands, run),
        "keeps_subnormals": _keeps_subnormals(problem, operands, run),
    }
    relative_error = relative_l2_error(run(operands), exact(problem, operands))
    return Row(_subject(problem), name, relative_error=relative_error, more=more)


def with_pixel(problem: ConvProblem, operands: Operands, value: float) -> Operands:
    """Return the operands with this value in one pixel of the image's first sample.

    The image is x, or dy for BACKWARD_DATA; the pixel is in its middle, or a corner for BACKWARD_FILTER.
    """
    image = _image(problem, operands).clone()
    _, _, height, width = image.shape
    of_filter = problem.operation is Operation.BACKWARD_FILTER
    row, column = (height - 1, width - 1) if of_filter else (height // 2, width // 2)
    image[0, 0, row, column] = value
    return _with_image(problem, operands, image)


def dependent_results(problem: ConvProblem, operands: Operands) -> Tensor:
    """Return a mask of the operation's results that depend, by definition, on nonzero elements of the operands."""
    x, w, y = ((tensor != 0).to(tensor.dtype) for tensor in (operands.x, operands.w, operands.y))
    return exact(problem, Operands(x, w, y)) != 0


def _image(problem: ConvProblem, operands: Operands) -> Tensor:
    return operands.y if problem.operation is Operation.BACKWARD_DATA else operands.x


def _with_image(problem: ConvProblem, operands: Operands, image: Tensor) -> Operands:
    if problem.operation is Operation.BACKWARD_DATA:
        return replace(operands, y=image)
    return replace(operands, x=image)


def _not_finite(results: Tensor) -> int:
    return int((~results.isfinite()).sum())


def _largest(problem: ConvProblem, operands: Operands, run: Callable[[Operands], Tensor]) -> float:
    image = _image(problem, operands)
    unit = image / image.abs().max()
    _, highest = frexp(torch.finfo(image.dtype).max)
    magnitudes = (2.0**exponent for exponent in reversed(range(highest)))
    scaled = ((magnitude, _with_image(problem, operands, unit * magnitude)) for magnitude in magnitudes)
    return next(magnitude for magnitude, large in scaled if run(large).isfinite().all())


def _outlier_error(problem: ConvProblem, operands: Operands, run: Callable[[Operands], Tensor]) -> float:
    image = _image(problem, operands)
    outlier = min(OUTLIER, torch.finfo(image.dtype).max / _OF_RANGE)
    ones = with_pixel(problem, _with_image(problem, operands, torch.ones_like(image)), outlier)
    alone = with_pixel(problem, _with_image(problem, operands, torch.zeros_like(image)), 1.0)
    errors = (run(ones).double() - exact(problem, ones)).abs()
    return float(errors[~dependent_results(problem, alone)].max())


def _keeps_subnormals(problem: ConvProblem, operands: Operands, run: Callable[[Operands], Tensor]) -> bool:
    small = torch.finfo(torch_dtype(problem)).smallest_normal / _SMALL
    tiny = _with_image(problem, operands, _image(problem, operands) * small)
    return relative_l2_error(run(tiny), exact(problem, tiny)) < 0.5  # The error of zeros is 1.


def _rounded(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.0e}"


_CELLS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "NaN spoils": lambda row: f"{row['nan_results']:,}",
    "Inf spoils": lambda row: f"{row['inf_results']:,}",
    "largest": lambda row: _rounded(row["largest"]),
    "error beside outlier": lambda row: _rounded(row["outlier_error"]),
    "subnormals": lambda row: "kept" if row["keeps_subnormals"] else "lost",
    "relative error": lambda row: _rounded(row["relative_error"]),
    "strict": lambda row: "yes" if row["local"] else "no",
}


def numerics_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table with a line for each algorithm and geometry, and a legend.

    Each geometry has a section. A cell has a value for each operation, or one value if all operations agree.
    """
    operations = " / ".join(dict.fromkeys(row["operation"] for row in folder.lines))
    printed = new_table(f"beside PyTorch's own ({TORCHS_OWN}): {operations}", ("algorithm", "filter, image"), [*_CELLS])
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in folder.lines:
        geometry = f"{row['filter']}, {row['image']}".replace("x", "×")
        lines.setdefault((row["contestant"], geometry), []).append(row)
    for (name, geometry), rows in lines.items():
        if name == TORCHS_OWN:
            printed.add_section()
        cells = ([*map(cell, rows)] for cell in _CELLS.values())
        printed.add_row(name, geometry, *(texts[0] if len({*texts}) == 1 else " / ".join(texts) for texts in cells))
    yield printed
    yield (
        f"{SAMPLES} samples, {_CHANNELS} channels to {_CHANNELS}, stride 1, output as large as the image; "
        f"{folder.header.settings['dtype']} contiguous. The image is x, or dy of backward data.\n"
        "spoils: results that one NaN or Inf makes not finite (in the middle; backward filter: in the corner)\n"
        "largest: the largest element of an image, as a power of two, with which all results are finite\n"
        "error beside outlier: of results independent of a pixel of a million (float16: a thousand) among ones\n"
        "subnormals: whether images of subnormals give correct results, not zeros\n"
        "relative error: L2, against float64, of normal random numbers; strict: whether --strict allows it"
    )
