"""Raw samples (single timings) stored in the database: a table of statistics, rows of single samples, and JSON.

A *series* is the list of samples of one quantity: setup or step of a measurement, or baseline or configuration of a
whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from rich.table import Table

from mucudnn.bench.report.records import Record, stamp
from mucudnn.bench.report.tables import new_table
from mucudnn.database.configuration_keys import whole_run_from
from mucudnn.database.samples import unpacked
from mucudnn.database.schema import ENVIRONMENT_COLUMNS, PROBLEM_COLUMNS, SAMPLES, Row, problem_from
from mucudnn.running.environment import Environment
from mucudnn.words.problem import Operation
from mucudnn.words.results import Configuration, source_of

_OF_SERIES = ("algorithm", "version", "micro_batch_size", "configuration", "load", "stolen", "clock_hz")
_IN_WORDS = {"setup_s": "setup", "step_s": "step", "baseline_s": "baseline", "time_s": "whole run"}
_MS_PER_S, _HZ_PER_GHZ = 1e3, 1e9


def wanted(
    rows: Iterable[Row],
    environments: Collection[Environment],
    operations: Collection[Operation] = tuple(Operation),
    algorithms: Collection[str] | None = None,
    parts: Collection[str] = (),
) -> list[Row]:
    """Return the database rows (measurements and whole runs) that match all conditions.

    algorithms: names of algorithms or sources of algorithms; a row must use at least one of them. None selects all
    rows. parts: texts that must all occur in the problem's description, ignoring case.
    """

    def is_wanted(row: Row) -> bool:
        if row["kind"] not in SAMPLES:
            return False
        in_description = str(problem_from(_problem(row))).lower()
        names = _algorithms(row)
        return (
            environment_of(row) in environments
            and row["operation"] in operations
            and (algorithms is None or not names.union(map(source_of, names)).isdisjoint(algorithms))
            and all(part.lower() in in_description for part in parts)
        )

    return [row for row in rows if is_wanted(row)]


def series(rows: Iterable[Row]) -> Iterator[Record]:
    """Yield each series of samples in database rows as a JSON object; rows without samples have no series.

    The last key is ``samples_s``, in seconds.
    """
    for row in rows:
        for column in SAMPLES[row["kind"]]:
            if (stored := row[column]) is not None:
                described = {name: row[name] for name in (*ENVIRONMENT_COLUMNS, *PROBLEM_COLUMNS, *_OF_SERIES)}
                head = {"kind": row["kind"], "measured_at": row["measured_at"]}
                of = column.replace("_samples_s", "_s")
                yield {**head, **described, "of": of, "samples_s": unpacked(stored)}


def environment_of(values: Mapping[str, Any]) -> Environment:
    """Return the environment (machine and libraries) of a database row or series."""
    return Environment(*(values[name] for name in ENVIRONMENT_COLUMNS))


def in_words(rows: Sequence[Row]) -> str:
    """Return a sentence on the number of samples in database rows, and the number of measurements without samples."""
    without = sum(all(row[column] is None for column in SAMPLES[row["kind"]]) for row in rows)
    samples = sum(len(one["samples_s"]) for one in series(rows))
    told = f"{samples} samples of {len(rows) - without} measurements and whole runs"
    return f"{told}; {without} have none" if without else told


def sample_rows(every: Iterable[Record]) -> list[Record]:
    """Return a row for each sample of all series: its series, its index there, and ``sample_s`` in seconds."""
    return [
        {**{name: value for name, value in one.items() if name != "samples_s"}, "sample": number, "sample_s": sample}
        for one in every
        for number, sample in enumerate(one["samples_s"])
    ]


def samples_record(every: Iterable[Record]) -> Record:
    """Return one JSON object with all series, each with the list of its samples."""
    return {**stamp(), "series": [*every]}


def samples_table(environment: Environment, every: Sequence[Record]) -> Table:
    """Return a table of the series of one environment: number, median, quartiles and minimum of the samples of each."""
    table = new_table(
        str(environment),
        ("convolution", "measured", "of"),
        ("samples", "median (ms)", "quartiles (ms)", "least (ms)", "load", "stolen", "clock", "date (UTC)"),
    )
    before = ""
    for one in sorted(every, key=lambda one: (_convolution(one), one["kind"], one["measured_at"])):
        least, lower, middle, upper = np.quantile(one["samples_s"], [0, 0.25, 0.5, 0.75])
        convolution = _convolution(one)
        table.add_row(
            convolution if convolution != before else "",
            _measured(one),
            _IN_WORDS[one["of"]],
            str(len(one["samples_s"])),
            _ms(middle),
            f"{_ms(lower)} to {_ms(upper)}",
            _ms(least),
            *(_known(one[name], "{:.0%}".format) for name in ("load", "stolen")),
            _known(one["clock_hz"], lambda hz: f"{hz / _HZ_PER_GHZ:.2f} GHz"),
            datetime.fromisoformat(one["measured_at"]).strftime("%Y-%m-%d %H:%M"),
        )
        before = convolution
    return table


def _measured(one: Mapping[str, Any]) -> str:
    """Return the name of the timed item of a series: algorithm and size, ``gemm 8``, or a whole run's configuration."""
    if one["configuration"] is None:
        return f"{one['algorithm']} {one['micro_batch_size']}"
    micro_configs, _, fresh = whole_run_from(one["configuration"])
    return f"{Configuration(micro_configs, 0.0, 0)}{', fresh workspace' if fresh else ''}"


def _ms(seconds: float) -> str:
    return f"{seconds * _MS_PER_S:.4g}"


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return "unknown" if value is None else text(value)


def _convolution(one: Mapping[str, Any]) -> str:
    return str(problem_from([one[name] for name in PROBLEM_COLUMNS]))


def _problem(row: Row) -> list[Any]:
    return [row[name] for name in PROBLEM_COLUMNS]


def _algorithms(row: Row) -> frozenset[str]:
    if row["kind"] == "measurement":
        return frozenset((row["algorithm"],))
    micro_configs, _, _ = whole_run_from(row["configuration"])
    return frozenset(m.algorithm for m in micro_configs)
