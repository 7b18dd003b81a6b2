"""Report of a network's convolutions: a table for people, a record for programs."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from mucudnn.bench.report.records import Record, configuration_record, key_of, record_header
from mucudnn.bench.report.tables import comparison, long_name, milliseconds, new_table, ratio, short_name
from mucudnn.bench.suites.network.result import SLOWER, FormatResult, NetworkBenchmark, ProblemResult, SecondLook
from mucudnn.tuning.result import left_out_in_words


def network_table(benchmark: NetworkBenchmark) -> Table:
    """Torch's and mucudnn's times of each layer and operation in every measured memory format; then totals."""
    formats = benchmark.memory_formats
    columns = ["count"]
    totals = [""]
    for memory_format in formats:
        names = benchmark.torch_benchmarks
        columns += [f"{name} ms {memory_format}" for name in names]
        totals += [milliseconds(benchmark.torch_benchmark_s(name, memory_format)) for name in names]
        columns += [f"torch ms {memory_format}", f"mucudnn ms {memory_format}", "speedup"]
        totals += comparison(
            benchmark.torch_s(memory_format), benchmark.mucudnn_s(memory_format), benchmark.speedup(memory_format)
        )
        if benchmark.limits.are_known:
            columns.append("/ bound")
            totals.append("")
    batch_sizes = ", ".join(str(n) for n in sorted({result.batch_size for result in benchmark.problems}))
    title = f"{benchmark.network}, batch {batch_sizes}"
    printed = new_table(
        title, ("layer", "operation", "faster configuration"), columns, footer=("total", "", "", *totals)
    )
    for result in benchmark.problems:
        printed.add_row(*_result_cells(benchmark, result))
    printed.caption = (
        f"better torch / better mucudnn: {ratio(benchmark.speedup_best)}; "
        f"predicted against measured time: median error {benchmark.prediction_error:.1%}, "
        f"and {benchmark.prediction_error_when_tuned:.1%} right after tuning"
    )
    if means := benchmark.over_bound_by_kind():
        shown = ", ".join(f"{kind} {value:.2f}" for kind, value in means.items())
        printed.caption += (
            f"\n/ bound: mucudnn's time over that of the direct method at {benchmark.limits}; "
            f"geometric mean in the faster format: {shown}"
        )
    if benchmark.second_looks:
        printed.caption += f"\n{_second_looks_in_words(benchmark)}"
    every = [measured.tuned for result in benchmark.problems for measured in result.formats.values()]
    if left_out := left_out_in_words(every):
        printed.caption += f"\n{left_out}"
    return printed


def _second_looks_in_words(benchmark: NetworkBenchmark) -> str:
    looks = benchmark.second_looks
    slower = [look for look in looks if look.is_confirmed]
    text = f"below {SLOWER} of torch: {len(looks)}; in a second look, of twice the rounds, {len(slower)}"
    shown = (
        f"{short_name(look.first.names)} {look.first.operation} {look.memory_format} {ratio(look.speedup.ratio)}"
        f" ({ratio(look.speedup.low)} to {ratio(look.speedup.high)})"
        for look in slower
    )
    return f"{text}: {', '.join(shown)}" if slower else text


def _result_cells(benchmark: NetworkBenchmark, result: ProblemResult) -> tuple[str, ...]:
    cells = [
        short_name(result.names),
        str(result.operation),
        str(result.formats[result.best_format].tuned.configuration),
        str(result.count),
    ]
    for measured in result.formats.values():
        cells += [milliseconds(cell.time_s) for cell in measured.torch_benchmarks.values()]
        cells += comparison(measured.torch.time_s, measured.mucudnn.time_s, measured.speedup)
        if benchmark.limits.are_known:
            cells.append(f"{benchmark.over_bound(measured):.2f}")
    return tuple(cells)


def network_record(benchmark: NetworkBenchmark) -> Record:
    """The object that ``mucudnn bench network --json`` writes.

    ``configuration``, ``workspace_bytes`` and ``relative_error`` of a problem are those of ``memory_format``, the one
    in which mucudnn is faster. ``formats`` has them for each format, with noise and predicted time. Torch's benchmark
    modes have keys of their own, ``torch_benchmark_10_contiguous_s``, where they were measured.
    ``second_looks`` has the samples of what seemed slower than torch's and was measured again.
    ``machine_limits`` has the machine's best rates, ``over_bound`` our time over the bound that they set: null on GPUs.
    """
    total: Record = {}
    for memory_format in benchmark.memory_formats:
        total[f"torch_{memory_format}_s"] = benchmark.torch_s(memory_format)
        for name in benchmark.torch_benchmarks:
            total[f"{key_of(name)}_{memory_format}_s"] = benchmark.torch_benchmark_s(name, memory_format)
        total[f"mucudnn_{memory_format}_s"] = benchmark.mucudnn_s(memory_format)
        total[f"speedup_{memory_format}"] = benchmark.speedup(memory_format)
    total["speedup_best"] = benchmark.speedup_best
    total["prediction_error"] = benchmark.prediction_error
    total["prediction_error_when_tuned"] = benchmark.prediction_error_when_tuned
    total["over_bound"] = benchmark.over_bound_by_kind()
    return {
        **record_header(benchmark.config, benchmark.environment, benchmark.date),
        "network": benchmark.network,
        "rounds": benchmark.rounds,
        "machine_limits": asdict(benchmark.limits) if benchmark.limits.are_known else None,
        "problems": [_problem(benchmark, result) for result in benchmark.problems],
        "second_looks": [_second_look(look) for look in benchmark.second_looks],
        "total": total,
    }


def _problem(benchmark: NetworkBenchmark, result: ProblemResult) -> Record:
    record: Record = {
        "layer": long_name(result.names),
        "operation": result.operation,
        "count": result.count,
        "batch_size": result.batch_size,
    }
    for memory_format, measured in result.formats.items():
        record[f"torch_{memory_format}_s"] = measured.torch.time_s
        for name, cell in measured.torch_benchmarks.items():
            record[f"{key_of(name)}_{memory_format}_s"] = cell.time_s
        record[f"mucudnn_{memory_format}_s"] = measured.mucudnn.time_s
    best = result.formats[result.best_format].tuned
    return {
        **record,
        "memory_format": result.best_format,
        **configuration_record(best.configuration),
        "relative_error": best.relative_error,
        "formats": {memory_format: _format(benchmark, measured) for memory_format, measured in result.formats.items()},
    }


def _format(benchmark: NetworkBenchmark, measured: FormatResult) -> Record:
    tuned = measured.tuned
    return {
        **configuration_record(tuned.configuration),
        "relative_error": tuned.relative_error,
        "speedup": measured.speedup,
        "predicted_s": tuned.configuration.time_s,
        "predicted_over_measured": measured.predicted_over_measured,
        "torch_noise": measured.torch.noise,
        **{f"{key_of(name)}_noise": cell.noise for name, cell in measured.torch_benchmarks.items()},
        "mucudnn_noise": measured.mucudnn.noise,
        "over_bound": benchmark.over_bound(measured) if benchmark.limits.are_known else None,
        "reason": tuned.reason,
    }


def _second_look(look: SecondLook) -> Record:
    return {
        "layer": long_name(look.first.names),
        "operation": look.first.operation,
        "memory_format": look.memory_format,
        "speedup": look.speedup.ratio,
        "is_confirmed": look.is_confirmed,
        "torch_samples_s": look.again.torch.samples_s,
        "mucudnn_samples_s": look.again.mucudnn.samples_s,
    }
