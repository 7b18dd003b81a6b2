"""Tables for people, made from layer tables, tunings and benchmarks. Milliseconds and MiB appear here only."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from mucudnn.bench.layers import Layer, LayerTable
from mucudnn.bench.network_benchmark import NetworkBenchmark, ProblemResult
from mucudnn.bench.table_tuning import TableTuning, TunedLayer
from mucudnn.bench.training import TrainingComparison
from mucudnn.config import Config
from mucudnn.problem import Pair
from mucudnn.tuning import TunedProblem, left_out_in_words
from mucudnn.units import format_bytes


def layers_table(table: LayerTable) -> Table:
    """The convolutions of a source, with their sizes."""
    columns = ("N", "C×H×W", "K", "filter", "stride", "padding", "dilation", "groups", "count", "GFLOP")
    printed = new_table(f"{table.source}: {len(table.layers)} convolutions", ("layer",), columns)
    for layer in table.layers:
        printed.add_row(*_layer_cells(layer))
    return printed


def tuning_table(tuning: TableTuning) -> Table:
    """Per layer and operation: torch's time, what was chosen, its time, workspace, error and speedup; then totals.

    Below, and in a column of its own, what a time limit left out, if it did.
    """
    left_out = left_out_in_words([row.tuned for row in tuning.rows])
    more = ("not measured",) if left_out else ()
    columns = ("count", "torch ms", "chosen ms", "speedup", "workspace", "rel. error", *more)
    printed = new_table(
        f"{tuning.source}, {memory_bound(tuning.config)}",
        ("layer", "operation", "configuration"),
        columns,
        footer=("total", "", "", "", *_totals(tuning), "", *("" for _ in more)),
    )
    for row in tuning.rows:
        printed.add_row(*_tuned_cells(row), *(_unmeasured(row.tuned) for _ in more))
    printed.caption = left_out or None
    return printed


def network_table(benchmark: NetworkBenchmark) -> Table:
    """Per layer and operation: torch's and mucudnn's times in every measured memory format; then totals."""
    formats = benchmark.memory_formats
    columns = ["count"]
    totals = [""]
    for memory_format in formats:
        names = benchmark.torch_benchmarks
        columns += [f"{name} ms {memory_format}" for name in names]
        totals += [milliseconds(benchmark.torch_benchmark_s(name, memory_format)) for name in names]
        columns += [f"torch ms {memory_format}", f"mucudnn ms {memory_format}", "speedup"]
        totals += _comparison(
            benchmark.torch_s(memory_format), benchmark.mucudnn_s(memory_format), benchmark.speedup(memory_format)
        )
    batch_sizes = ", ".join(str(n) for n in sorted({result.batch_size for result in benchmark.problems}))
    title = f"{benchmark.network}, batch {batch_sizes}"
    printed = new_table(
        title, ("layer", "operation", "faster configuration"), columns, footer=("total", "", "", *totals)
    )
    for result in benchmark.problems:
        printed.add_row(*_result_cells(result))
    printed.caption = (
        f"better torch / better mucudnn: {ratio(benchmark.speedup_best)}; "
        f"predicted against measured time: median error {benchmark.prediction_error:.1%}, "
        f"and {benchmark.prediction_error_when_tuned:.1%} right after tuning"
    )
    every = [measured.tuned for result in benchmark.problems for measured in result.formats.values()]
    if left_out := left_out_in_words(every):
        printed.caption += f"\n{left_out}"
    return printed


def training_table(comparison: TrainingComparison) -> Table:
    """Time per step with torch.nn.Conv2d and with mucudnn, and how far the two trainings part."""
    printed = new_table(f"training, {len(comparison.losses)} steps in turns from the same seed", ("",), ("",))
    printed.show_header = False
    printed.add_row("torch.nn.Conv2d, ms per step", milliseconds(comparison.torch_step_s))
    printed.add_row("mucudnn, ms per step", milliseconds(comparison.mucudnn_step_s))
    printed.add_row("speedup of the whole step", ratio(comparison.speedup))
    printed.add_row("loss, first and last step", f"{comparison.losses[0]:.3f} → {comparison.losses[-1]:.3f}")
    rows = (("mucudnn", comparison.difference), ("torch in channels_last", comparison.yardstick))
    for name, difference in rows:
        printed.add_row(f"{name} against torch: largest relative difference of the losses", f"{difference.loss:.1e}")
        printed.add_row(f"{name} against torch: ... and of the gradients", f"{difference.gradient:.1e}")
    return printed


def new_table(title: str, left: tuple[str, ...], right: Sequence[str], footer: tuple[str, ...] = ()) -> Table:
    """Text columns, then columns of numbers; ``footer`` has one text for each, or is empty."""
    printed = Table(title=title, title_justify="left", caption_justify="left", show_footer=bool(footer))
    for column in left:
        printed.add_column(column)
    for column in right:
        printed.add_column(column, justify="right")
    for index, text in enumerate(footer):
        printed.columns[index].footer = text
    return printed


def _layer_cells(layer: Layer) -> tuple[str, ...]:
    problem = layer.problem
    return (
        short_name(layer.name),
        str(layer.batch_size),
        f"{problem.c}×{problem.h}×{problem.w}",
        str(problem.k),
        _pair((problem.r, problem.s)),
        _pair(problem.stride),
        _pair(problem.padding),
        _pair(problem.dilation),
        str(problem.groups),
        str(layer.count),
        f"{problem.flops(layer.batch_size) / 1e9:.2f}",
    )


def _tuned_cells(row: TunedLayer) -> tuple[str, ...]:
    tuned = row.tuned
    return (
        short_name(row.layer),
        str(tuned.problem.operation),
        str(tuned.configuration),
        str(row.count),
        *_against_torch(tuned.baseline_s, tuned.time_s),
        format_bytes(tuned.configuration.workspace_bytes),
        "" if tuned.relative_error is None else f"{tuned.relative_error:.1e}",
    )


def _unmeasured(tuned: TunedProblem) -> str:
    """``11 of 15``: candidates that the time limit left out."""
    left_out = len(tuned.left_out.unmeasured)
    return f"{left_out} of {left_out + len(tuned.measurements)}" if left_out else ""


def _totals(tuning: TableTuning) -> tuple[str, ...]:
    if not tuning.rows:
        return ("", "", "", "")
    return (*_against_torch(tuning.baseline_s, tuning.time_s), format_bytes(tuning.workspace_bytes))


def memory_bound(config: Config) -> str:
    """``workspace limit 64 MiB``: what the config allows, for titles."""
    if config.workspace_budget_bytes is not None:
        return f"workspace budget {format_bytes(config.workspace_budget_bytes)}"
    if config.has_headroom_limit:
        return "workspace within the headroom"
    return f"workspace limit {format_bytes(config.workspace_limit_bytes)}"


def _result_cells(result: ProblemResult) -> tuple[str, ...]:
    cells = [
        short_name(result.layer),
        str(result.operation),
        str(result.formats[result.best_format].tuned.configuration),
        str(result.count),
    ]
    for measured in result.formats.values():
        cells += [milliseconds(cell.time_s) for cell in measured.torch_benchmarks.values()]
        cells += _comparison(measured.torch.time_s, measured.mucudnn.time_s, measured.speedup)
    return tuple(cells)


def _comparison(baseline_s: float, time_s: float, speedup: float) -> tuple[str, str, str]:
    return milliseconds(baseline_s), milliseconds(time_s), ratio(speedup)


def _against_torch(baseline_s: float | None, time_s: float) -> tuple[str, str, str]:
    """Nothing for what is not known."""
    return (
        ("", milliseconds(time_s), "") if baseline_s is None else _comparison(baseline_s, time_s, baseline_s / time_s)
    )


def short_name(names: str) -> str:
    """``a, b, c`` -> ``a +2``: equal layers share a row, which the first of them names."""
    first, *others = names.split(", ")
    first = first or "(the model itself)"
    return f"{first} +{len(others)}" if others else first


def milliseconds(time_s: float) -> str:
    """Without unit, which the column has."""
    return f"{time_s * 1e3:.2f}"


def ratio(value: float) -> str:
    """``1.40×``."""
    return f"{value:.2f}×"


def _pair(value: Pair) -> str:
    return f"{value[0]}×{value[1]}"
