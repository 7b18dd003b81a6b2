"""Records for programs (plain dictionaries, for JSON), made from tunings and benchmarks. Seconds and bytes."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import mucudnn
from mucudnn.bench.accounts import accounts_of
from mucudnn.bench.network_benchmark import FormatResult, NetworkBenchmark, ProblemResult
from mucudnn.bench.solver_benchmark import SolverBenchmark
from mucudnn.bench.table_tuning import TableTuning, TunedLayer
from mucudnn.config import Config
from mucudnn.configuration import Configuration
from mucudnn.environment import Environment

FORMAT_VERSION = 1  # of all records; raised when a key changes its meaning or goes

Record = dict[str, Any]


def tuning_record(tuning: TableTuning, environment: Environment) -> Record:
    """What ``mucudnn tune --json`` writes; ``complete`` is false after Ctrl-C."""
    return {
        **record_header(tuning.config, environment, datetime.now(UTC)),
        "source": tuning.source,
        "complete": not tuning.interrupted,
        "problems": [_tuned(row) for row in tuning.rows],
        "accounts": None if tuning.divided is not None else _accounts(tuning),
        "total": {
            "torch_s": tuning.baseline_s,
            "mucudnn_s": tuning.time_s,
            "speedup": tuning.speedup,
            "workspace_bytes": tuning.workspace_bytes,
        },
        "division": None if tuning.divided is None else tuning.divided.division.to_json(),
    }


def network_record(benchmark: NetworkBenchmark) -> Record:
    """What ``mucudnn bench network --json`` writes.

    ``configuration``, ``workspace_bytes`` and ``relative_error`` of a problem are those of ``memory_format``, the one
    in which mucudnn is faster; ``formats`` has them, noise and predicted time for each. Torch's benchmark modes have
    keys of their own, ``torch_benchmark_10_contiguous_s``, where they were measured.
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
    return {
        **record_header(benchmark.config, benchmark.environment, benchmark.date),
        "network": benchmark.network,
        "rounds": benchmark.rounds,
        "problems": [_problem(result) for result in benchmark.problems],
        "total": total,
    }


def record_header(config: Config, environment: Environment, date: datetime) -> Record:
    """What every record of a tuning starts with: versions, date, where and with which choices it was made."""
    choices = asdict(config)
    if config.database is not None:
        choices["database"] = str(config.database)
    return {**origin(environment, date), "config": choices}


def origin(environment: Environment, date: datetime) -> Record:
    """What every record starts with: versions, date and where it was made."""
    return {
        "format_version": FORMAT_VERSION,
        "mucudnn": mucudnn.__version__,
        "date": date.isoformat(timespec="seconds"),
        "environment": asdict(environment),
    }


def solver_record(benchmark: SolverBenchmark) -> Record:
    """What ``mucudnn bench solver --json`` writes; ``program`` is what harder divisions were solved with."""
    return {
        **origin(benchmark.environment, benchmark.date),
        "program": benchmark.program,
        "rows": [asdict(row) for row in benchmark.rows],
    }


def key_of(name: str) -> str:
    """``torch-benchmark-10`` -> ``torch_benchmark_10``, as keys and columns are written."""
    return name.replace("-", "_")


def _configuration(configuration: Configuration) -> Record:
    return {"configuration": str(configuration), "workspace_bytes": configuration.workspace_bytes}


def _accounts(tuning: TableTuning) -> list[Record | None]:
    return [None if account is None else account.to_json() for account in accounts_of(tuning)]


def _tuned(row: TunedLayer) -> Record:
    tuned = row.tuned
    return {
        "layer": row.layer,
        "operation": tuned.problem.operation,
        "count": row.count,
        "batch_size": tuned.batch_size,
        "problem": asdict(tuned.problem),
        "torch_s": tuned.baseline_s,
        "mucudnn_s": tuned.time_s,
        "predicted_s": tuned.configuration.time_s,
        "speedup": tuned.speedup,
        **_configuration(tuned.configuration),
        "relative_error": tuned.relative_error,
        "reason": tuned.reason,
        "failures": [{**asdict(failure.micro_config), "reason": failure.reason} for failure in tuned.failures],
        **asdict(tuned.left_out),
    }


def _problem(result: ProblemResult) -> Record:
    record: Record = {
        "layer": result.layer,
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
        **_configuration(best.configuration),
        "relative_error": best.relative_error,
        "formats": {memory_format: _format(measured) for memory_format, measured in result.formats.items()},
    }


def _format(measured: FormatResult) -> Record:
    tuned = measured.tuned
    return {
        **_configuration(tuned.configuration),
        "relative_error": tuned.relative_error,
        "speedup": measured.speedup,
        "predicted_s": tuned.configuration.time_s,
        "predicted_over_measured": measured.predicted_over_measured,
        "torch_noise": measured.torch.noise,
        **{f"{key_of(name)}_noise": cell.noise for name, cell in measured.torch_benchmarks.items()},
        "mucudnn_noise": measured.mucudnn.noise,
        "reason": tuned.reason,
    }
