"""Report of the numerics benchmark: a table for people, CSV and JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from rich.table import Table

from mucudnn.bench.report.records import Record, origin
from mucudnn.bench.report.tables import new_table
from mucudnn.bench.suites.numerics.result import SAMPLES, AlgorithmNumerics, NumericsBenchmark
from mucudnn.words.torch_settings import TORCHS_OWN

_COLUMNS: Mapping[str, Callable[[AlgorithmNumerics], str]] = {
    "NaN spoils": lambda row: f"{row.nan_results:,}",
    "Inf spoils": lambda row: f"{row.inf_results:,}",
    "largest": lambda row: f"{row.largest:.0e}",
    "error beside outlier": lambda row: f"{row.outlier_error:.0e}",
    "subnormals": lambda row: "kept" if row.keeps_subnormals else "lost",
    "relative error": lambda row: f"{row.relative_error:.0e}",
    "strict": lambda row: "yes" if row.local else "no",
}


def numerics_table(benchmark: NumericsBenchmark) -> Table:
    """A line for each algorithm and geometry, a section for each geometry; cells have a value for each operation."""
    operations = " / ".join(dict.fromkeys(row.problem.operation for row in benchmark.rows))
    printed = new_table(f"beside torch's own ({TORCHS_OWN}): {operations}", ("algorithm", "filter, image"), [*_COLUMNS])
    for (name, geometry), rows in _by_line(benchmark).items():
        if name == TORCHS_OWN:
            printed.add_section()
        printed.add_row(name, geometry, *(_joined([*map(cell, rows)]) for cell in _COLUMNS.values()))
    return printed


def in_words(benchmark: NumericsBenchmark) -> str:
    """Tell how it was computed, and what the columns are."""
    problem = benchmark.rows[0].problem
    return (
        f"{SAMPLES} samples, {problem.c} channels to {problem.k}, stride 1, output as large as the image; "
        f"{problem.dtype} {problem.memory_format}. The image is x, or dy of backward data.\n"
        "spoils: results that one such pixel makes NaN or infinite (in the middle; backward filter: in the corner)\n"
        "largest: largest element of an image, to a power of two, up to which all results are finite\n"
        "error beside outlier: of results that have no part in a pixel of a million (float16: a thousand) among ones\n"
        "subnormals: whether images of them have the right results, rather than zero\n"
        "relative error: L2, against float64, of random normal numbers; strict: whether --strict allows it"
    )


def numerics_record(benchmark: NumericsBenchmark) -> Record:
    """The object that ``mucudnn bench numerics --json`` writes."""
    return {
        **origin(benchmark.environment, benchmark.date),
        "samples": SAMPLES,
        "rows": [asdict(row) for row in benchmark.rows],
    }


def numerics_rows(benchmark: NumericsBenchmark) -> list[Record]:
    """Lines of the CSV file: one for each result, the problem's fields in columns of their own."""
    return [_flat(row) for row in benchmark.rows]


def _by_line(benchmark: NumericsBenchmark) -> dict[tuple[str, str], list[AlgorithmNumerics]]:
    """(algorithm, geometry) -> the results of its operations."""
    lines: dict[tuple[str, str], list[AlgorithmNumerics]] = {}
    for row in benchmark.rows:
        problem = row.problem
        geometry = f"{problem.r}×{problem.s}, {problem.h}×{problem.w}"
        lines.setdefault((row.algorithm, geometry), []).append(row)
    return lines


def _joined(values: Sequence[str]) -> str:
    """The values, joined; a single one if all are the same."""
    return values[0] if len({*values}) == 1 else " / ".join(values)


def _flat(row: AlgorithmNumerics) -> Record:
    record = asdict(row)
    of_problem = record.pop("problem")
    pairs = {name: "x".join(map(str, value)) for name, value in of_problem.items() if isinstance(value, tuple)}
    return {"algorithm": record.pop("algorithm"), **of_problem, **pairs, **record}
