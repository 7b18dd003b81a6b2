"""Divides a batch over unequal devices, by the times of their convolutions at every local batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.table import Table

from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import memory_bound, milliseconds, new_table, ratio
from mucudnn.bench.scaling.local_batches import Convolutions, local_batches
from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.solver.shares import Shares, best_shares, equal_shares


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """A batch divided over unequal devices, in the order of ``names``, with the best shares and with equal shares.

    tunings: measurements of each device. rest_s: seconds per sample outside of convolutions. alone_s: seconds of the
    whole batch on each device alone.
    """

    batch: int
    names: tuple[str, ...]
    tunings: tuple[TableTuning, ...]
    rest_s: tuple[float, ...]
    best: Shares
    equal: Shares
    alone_s: tuple[float, ...]

    @property
    def speedup_over_equal(self) -> float:
        return self.equal.step_s / self.best.step_s

    @property
    def speedup_over_fastest(self) -> float:
        return min(self.alone_s) / self.best.step_s


def share_out(devices: Sequence[tuple[str, TableTuning]], batch: int, rest_s: Sequence[float]) -> SharedBatch:
    """Divide a batch over devices so that all finish at the same time.

    rest_s: seconds per sample outside of convolutions, for each device. Communication is ignored, because its time does
    not depend on the shares. Raises the ``InvalidInputError`` and ``InfeasibleError`` of ``best_shares``.

    devices: name of each device, and its tuning at this batch size.
    """
    samples = np.arange(batch + 1)
    curves = [
        (local_batches(tuning, batch, batch).times_s[Convolutions.MUCUDNN] + each_s * samples).tolist()
        for (_, tuning), each_s in zip(devices, rest_s, strict=True)
    ]
    return SharedBatch(
        batch=batch,
        names=tuple(name for name, _ in devices),
        tunings=tuple(tuning for _, tuning in devices),
        rest_s=tuple(rest_s),
        best=best_shares(curves, batch),
        equal=equal_shares(curves, batch),
        alone_s=tuple(curve[batch] for curve in curves),
    )


_COLUMNS = ("samples", "ms", "equal share", "ms", "whole batch alone ms")


def shares_table(result: SharedBatch) -> Table:
    """Return a table with a row for each device. The footer has the time of the step, that of the slowest device."""
    first = result.tunings[0]
    title = f"{first.source}, {result.batch} samples on {len(result.names)} devices, {memory_bound(first.config)}"
    steps = ("the step", "", "", milliseconds(result.best.step_s), "", milliseconds(result.equal.step_s), "")
    printed = new_table(title, ("profile", "device"), _COLUMNS, steps)
    for row in share_rows(result):
        printed.add_row(
            row["profile"],
            row["device"],
            str(row["samples"]),
            milliseconds(row["time_s"]),
            str(row["equal_samples"]),
            milliseconds(row["equal_time_s"]),
            milliseconds(row["alone_s"]),
        )
    return printed


def in_words(result: SharedBatch) -> str:
    """Describe the speedup from dividing a batch over devices, and the limits of the prediction."""
    rest = (
        "and the given rest of the step" if any(result.rest_s) else "alone, without the rest of the step (give --rest)"
    )
    return (
        f"{ratio(result.speedup_over_equal)} as fast as equal shares, {ratio(result.speedup_over_fastest)} as fast as "
        f"the fastest device alone\ntimes are predicted: measured convolutions {rest}; communication is left out\n"
        f"UnevenBatchSampler(data, shares={result.best.samples})"
    )


def share_record(result: SharedBatch) -> Record:
    """Return the JSON object of ``mucudnn share --json``; its ``devices`` are the rows of the CSV file."""
    first = result.tunings[0]
    header = record_header(first.config, first.environment)
    return {
        **{key: value for key, value in header.items() if key != "environment"},
        "environments": [asdict(tuning.environment) for tuning in result.tunings],
        "source": first.source,
        "batch": result.batch,
        "step_s": result.best.step_s,
        "equal_step_s": result.equal.step_s,
        "speedup_over_equal": result.speedup_over_equal,
        "speedup_over_fastest": result.speedup_over_fastest,
        "devices": share_rows(result),
    }


def share_rows(result: SharedBatch) -> list[Record]:
    """Return the rows of the CSV file, one for each device among which the batch is divided."""
    return [
        {
            "profile": result.names[number],
            "device": str(result.tunings[number].environment),
            "samples": result.best.samples[number],
            "time_s": result.best.times_s[number],
            "equal_samples": result.equal.samples[number],
            "equal_time_s": result.equal.times_s[number],
            "alone_s": result.alone_s[number],
            "rest_s": result.rest_s[number],
        }
        for number in range(len(result.names))
    ]
