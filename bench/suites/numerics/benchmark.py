"""Measures how results differ from torch's: the spread of NaN and infinities, the range, small beside large values.

Each algorithm computes small convolutions, with images in which a difference shows: see ``AlgorithmNumerics``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from math import frexp, inf, nan
from pathlib import Path

import torch
from torch import Tensor

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import FolderWriter, folder_if_named
from mucudnn.bench.suites.numerics.result import SAMPLES, AlgorithmNumerics, NumericsBenchmark
from mucudnn.kernels.contract.buffers import torch_dtype
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.registry import algorithm, algorithms
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.whole_runs import run_whole
from mucudnn.running.environment import Environment, current_environment
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress, silent
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.torch_settings import TORCHS_OWN

_INNER = ("algorithm", "problem", "relative_error")


def header_of(operations: Sequence[Operation], dtype: str, wanted: int, environment: Environment) -> Header:
    """Describe a run. wanted: algorithms times problems."""
    settings = {"operations": list(operations), "dtype": dtype, "samples": SAMPLES}
    return Header(
        *("numerics", "small images", settings, environment),
        subject_columns=("operation", "filter", "image", "dtype"),
        wanted=wanted,
        is_timed=False,
    )


def row_of(numerics: AlgorithmNumerics) -> Row:
    more = {name: value for name, value in asdict(numerics).items() if name not in _INNER}
    return Row(_subject(numerics.problem), numerics.algorithm, relative_error=numerics.relative_error, more=more)


def known_numerics(folder: FolderWriter, name: str, problem: ConvProblem) -> AlgorithmNumerics | None:
    """Return what an earlier run found; ``None``: nothing."""
    for line in folder.known(_subject(problem)):
        if line["contestant"] == name:
            fields = {one: line[one] for one in AlgorithmNumerics.__dataclass_fields__ if one not in _INNER}
            return AlgorithmNumerics(name, problem, relative_error=line["relative_error"], **fields)
    return None


def _subject(problem: ConvProblem) -> Subject:
    return {
        "operation": str(problem.operation),
        "filter": f"{problem.r}x{problem.s}",
        "image": f"{problem.h}x{problem.w}",
        "dtype": problem.dtype,
    }


OUTLIER = 1e6
_OF_RANGE = 64  # in half precision the outlier is the largest number / 64: its sums must be finite
_SMALL = 8  # subnormals are the smallest normal number / 8, and have some bits left


def benchmark_numerics(
    operations: Sequence[Operation] = tuple(Operation),
    dtype: str = "float32",
    progress: Progress = silent,
    out: Path | None = None,
) -> NumericsBenchmark:
    """Measure each algorithm of the CPU, on each of the operations that it computes in this dtype.

    out: a result folder, which gets each row; what it has is not measured again. Raises what ``open_folder`` raises.
    """
    wanted = [case for operation in operations for case in _cases(operation, dtype)]
    environment = current_environment()
    rows = []
    with folder_if_named(out, header_of(operations, dtype, len(wanted), environment)) as folder:
        for done, (name, problem) in enumerate(wanted):
            progress(f"{name}, {problem}", done / len(wanted))
            known = None if folder is None else known_numerics(folder, name, problem)
            rows.append(known or measure(name, problem))
            if folder is not None and known is None:
                folder.add([row_of(rows[-1])])
        if folder is not None:
            folder.write_summary()
    return NumericsBenchmark(tuple(rows), environment, datetime.now(UTC))


def measure(name: str, problem: ConvProblem) -> AlgorithmNumerics:
    """Measure the algorithm of this name on ``SAMPLES`` samples of a problem that it supports."""
    operands = random_operands(problem, SAMPLES)
    run = partial(_run, name, problem)
    return AlgorithmNumerics(
        algorithm=name,
        problem=problem,
        local=algorithm(name).is_local(problem),
        nan_results=_not_finite(run(with_pixel(problem, operands, nan))),
        inf_results=_not_finite(run(with_pixel(problem, operands, inf))),
        largest=_largest(problem, operands, run),
        outlier_error=_outlier_error(problem, operands, run),
        keeps_subnormals=_keeps_subnormals(problem, operands, run),
        relative_error=relative_l2_error(run(operands), _exact(problem, operands)),
    )


def geometries(operation: Operation, dtype: str = "float32") -> tuple[ConvProblem, ...]:
    """Problems to measure on. The first serves most algorithms, the others those that need a larger filter or image."""
    usual = ConvProblem(operation, c=8, h=16, w=16, k=8, r=3, s=3, padding=(1, 1), dtype=dtype)
    return usual, replace(usual, r=5, s=5, padding=(2, 2)), replace(usual, h=40, w=40)


def with_pixel(problem: ConvProblem, operands: Operands, value: float) -> Operands:
    """Put this value into the operands as the pixel of the image."""
    image = _image(problem, operands).clone()
    _, _, height, width = image.shape
    of_filter = problem.operation is Operation.BACKWARD_FILTER
    row, column = (height - 1, width - 1) if of_filter else (height // 2, width // 2)
    image[0, 0, row, column] = value
    return _with_image(problem, operands, image)


def dependent_results(problem: ConvProblem, operands: Operands) -> Tensor:
    """Mark the results in which a nonzero number of the operands has a part, by the definition."""
    x, w, y = ((tensor != 0).to(tensor.dtype) for tensor in (operands.x, operands.w, operands.y))
    parts = Operands(x, w, y)
    return _exact(problem, parts) != 0


def _cases(operation: Operation, dtype: str) -> Iterator[tuple[str, ConvProblem]]:
    """Each algorithm on the first geometry that it supports, and torch's own on all that are used."""
    rest = [candidate for candidate in algorithms() if candidate.name != TORCHS_OWN]
    for problem in geometries(operation, dtype):
        supporting = [candidate for candidate in rest if candidate.supports(problem) is None]
        if supporting:
            yield from ((name, problem) for name in (TORCHS_OWN, *(candidate.name for candidate in supporting)))
        rest = [candidate for candidate in rest if candidate not in supporting]


def _run(name: str, problem: ConvProblem, operands: Operands) -> Tensor:
    configuration = Configuration((MicroConfig(name, SAMPLES),), time_s=0.0, workspace_bytes=0)
    return run_whole(problem, configuration, operands)


def _exact(problem: ConvProblem, operands: Operands) -> Tensor:
    return reference(problem, operands.x, operands.w, operands.y)


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
    errors = (run(ones).double() - _exact(problem, ones)).abs()
    return float(errors[~dependent_results(problem, alone)].max())


def _keeps_subnormals(problem: ConvProblem, operands: Operands, run: Callable[[Operands], Tensor]) -> bool:
    small = torch.finfo(torch_dtype(problem)).smallest_normal / _SMALL
    tiny = _with_image(problem, operands, _image(problem, operands) * small)
    return relative_l2_error(run(tiny), _exact(problem, tiny)) < 0.5  # zeros have an error of 1
