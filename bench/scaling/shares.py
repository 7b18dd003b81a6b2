"""Shares a batch out to unlike devices, by the times of their convolutions at every local batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mucudnn.bench.scaling.local_batches import Convolutions, local_batches
from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.solver.shares import Shares, best_shares, equal_shares


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """A batch shared out to devices, in the order of ``names``: best shares, equal ones, and each device alone.

    tunings: of each device. alone_s: seconds of the whole batch on each. rest_s: seconds of a sample that are not
    convolutions.
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
    """Share a batch out to devices, each a name and a tuning at this batch size, so that all finish together.

    rest_s: of each device, seconds of a sample that are not convolutions. Communication is left out: it takes as long
    whatever the shares are.

    Raises ``InvalidInputError`` and ``InfeasibleError`` as ``best_shares``.
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
