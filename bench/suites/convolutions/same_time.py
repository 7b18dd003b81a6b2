"""A search for the smallest workspace with which mucudnn is as fast as torch, by interleaved calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from mucudnn.bench.contests.timing import Contestant, Samples, TurnRounds, try_in_turns
from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.rows import Row
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import Machine
from mucudnn.solver.front import desirable_sets
from mucudnn.tuning.result import TunedProblem, allowed
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Configuration

WITHIN = 0.02  # Times count as the same if they differ by at most this fraction.
_LIKELY = 1.1  # Configurations up to this factor slower than torch are tried, because predicted times are not exact.


@dataclass(frozen=True, slots=True)
class SameTime:
    """A search for the smallest workspace with which mucudnn is as fast as torch on one problem.

    reference: torch's call, whose time must be matched and whose workspace is compared.
    """

    machine: Machine
    problem: ConvProblem
    operands: Operands
    reference: Contestant
    rounds: TurnRounds

    def completed(self, row: Row, tunings: Sequence[TunedProblem], times: Mapping[Any, Samples | Exception]) -> Row:
        """Add torch's workspace, and the workspace that mucudnn needs to be as fast, to torch's row.

        Configurations that are already timed are tried first. Then the desirable set is bisected, in which time
        decreases as workspace grows.
        """
        torch_s = _seconds(times[row.contestant])
        torch_bytes = self._torch_bytes()
        timed = [tuned.configuration for tuned in tunings]
        fast = [c for c in timed if _is_as_fast(_seconds(times[c.micro_configs]), torch_s)]
        if _is_as_fast(_seconds(times[TORCH]), torch_s):
            fast += [replace(c, workspace_bytes=torch_bytes) for c in timed if c.is_baseline]
        fast = [c for c in fast if not c.is_baseline or c.workspace_bytes == torch_bytes]
        found = min(fast, key=lambda c: c.workspace_bytes, default=None)
        found = self._bisected(found, tunings, torch_s)
        least = None if found is None else found.workspace_bytes
        more = {"same_time_bytes": least, "same_time_configuration": None if found is None else str(found)}
        return replace(row, workspace_bytes=torch_bytes, more={**row.more, **more})

    def _bisected(
        self, found: Configuration | None, tunings: Sequence[TunedProblem], torch_s: float
    ) -> Configuration | None:
        points = self._smaller_and_likely(found, tunings, torch_s)
        first, last = 0, len(points)
        while first < last:
            middle = (first + last) // 2
            call = self.machine.whole_run(self.problem, points[middle], self.operands, keeps_workspace=True)
            theirs, ours = try_in_turns([self.reference, Contestant(call)], self.rounds, self.machine.clock)
            if _is_as_fast(_seconds(ours), _seconds(theirs)):
                last, found = middle, points[middle]
            else:
                first = middle + 1
        return found

    def _smaller_and_likely(
        self, found: Configuration | None, tunings: Sequence[TunedProblem], torch_s: float
    ) -> list[Configuration]:
        """Return the desirable configurations that need less workspace than ``found`` and may be as fast as torch."""
        measured = {m.micro_config: m for tuned in tunings for m in tuned.measurements}
        n, bound = tunings[0].batch_size, tunings[0].error_bound
        return [
            c
            for c in desirable_sets(allowed(measured.values(), bound), n).of(n)
            if not c.is_baseline
            and c.time_s <= _LIKELY * (1 + WITHIN) * torch_s
            and (found is None or c.workspace_bytes < found.workspace_bytes)
        ]

    def _torch_bytes(self) -> int:
        """Return the bytes that torch's convolution allocates in addition to its result, after selecting an engine."""
        peak = self.reference.runner(partial(peak_allocated_bytes, self.reference.call, self.machine.device))
        result = self.operands.written(self.problem.operation)
        return max(0, peak - result.numel() * result.itemsize)


def _seconds(time: Samples | Exception) -> float:
    return median(time) if isinstance(time, tuple) else float("inf")


def _is_as_fast(ours_s: float, theirs_s: float) -> bool:
    return ours_s <= (1 + WITHIN) * theirs_s
