"""The result of ``status``: problems since ``enable``, with number of calls, choice, reason and time saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum, auto
from math import inf
from typing import TYPE_CHECKING

import torch

from mucudnn.core.answers import TunedProblem
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration
from mucudnn.core.tables import Column, Table, choice_cell, filled, speedup_cell
from mucudnn.core.values import format_seconds, grouped
from mucudnn.running.choices import Choices

if TYPE_CHECKING:
    import pandas

_NOTHING = "no convolution was called: call mucudnn.enable(), or use mucudnn.tuned(), and run a model"


class Origin(StrEnum):
    """Origin of the configuration that runs."""

    MEASURED = "measured"
    DATABASE = "database"
    NEAREST = "nearest size"
    NONE = "not tuned"


class State(Enum):
    """How far the tuning of a size is."""

    NEW = auto()  # the database was not asked
    WAITING = auto()  # to be tuned once its layer's calls have taken long enough
    SETTLED = auto()  # tuned, or never to be


@dataclass(frozen=True, slots=True)
class Decision:
    """What runs for a size, and why.

    origin: where the configuration comes from.
    why: the reason, in words.
    configuration: what runs; None for torch's convolution where nothing was tuned.
    limit_bytes: the workspace limit of the configuration; None for no limit.
    baseline_s: torch's seconds per call; None if unknown, an estimate if derived from the nearest size.
    time_s: the configuration's seconds per call, likewise.
    """

    origin: Origin = Origin.NONE
    why: str = ""
    configuration: Configuration | None = None
    limit_bytes: int | None = None
    baseline_s: float | None = None
    time_s: float | None = None

    @classmethod
    def of(cls, tuned: TunedProblem, origin: Origin) -> Decision:
        """Return the decision for the choice that was made for this exact size."""
        return cls(origin, tuned.reason, tuned.configuration, tuned.limit_bytes, tuned.baseline_s, tuned.time_s)


@dataclass(slots=True, eq=False)
class ShapeStats:
    """Statistics of one problem with its batch size on one device, with one number of threads.

    calls: number of calls.
    ours: number of calls that did not run torch's convolution.
    ask_at: number of calls at which the next decision is due, or inf if there is none.
    call_s: least seconds of a timed call, before tuning.
    decision: what runs, and why.
    choices: the decision's configuration, ready to run; None for torch's convolution.
    tuned: the result of tuning this exact size.
    """

    problem: ConvProblem
    batch_size: int
    device: torch.device
    threads: int
    calls: int = 0
    ours: int = 0
    ask_at: float = 1
    call_s: float = inf
    state: State = State.NEW
    decision: Decision = Decision()
    choices: Choices | None = None
    tuned: TunedProblem | None = None

    @property
    def layer(self) -> tuple[object, ...]:
        """Key of the layer on this device, with this number of threads."""
        return *self.problem.layer, self.device, self.threads

    def run(self, decision: Decision) -> None:
        """Run this from now on, and drop the executables of the previous configuration."""
        self.decision, configuration = decision, decision.configuration
        self.choices = None
        if configuration is not None and not configuration.is_baseline:
            chosen = {self.problem: {self.batch_size: configuration}}
            self.choices = Choices(chosen, self.device.type, keeps_workspace=True, limit_bytes=decision.limit_bytes)

    def settle(self, decision: Decision, tuned: TunedProblem | None = None) -> None:
        """Run this for good.

        tuned: the result of tuning this exact size, if it was tuned.
        """
        self.run(decision)
        self.state, self.ask_at, self.tuned = State.SETTLED, inf, tuned

    @property
    def gained_s(self) -> float:
        """Seconds saved in all calls that ran the tuned choice, by the times measured in tuning."""
        baseline_s, time_s = self.decision.baseline_s, self.decision.time_s
        return 0.0 if baseline_s is None or time_s is None else self.ours * (baseline_s - time_s)


@dataclass(frozen=True, slots=True)
class Status:
    """Snapshot of the problems under one config. It prints as a table; ``to_frame()`` has every problem.

    problems: a size each, in the order of their first calls.
    spent_s: time spent on tuning.
    passed_by: reasons why calls are never tuned, with the number of shapes of such calls.
    heap: whether a kept heap was worth it, and why; None if that is not known, or was not tried.
    only_timed: number of shapes whose calls have taken too little time so far to be among the problems.
    """

    problems: tuple[ShapeStats, ...] = ()
    spent_s: float = 0.0
    passed_by: tuple[tuple[str, int], ...] = ()
    heap: str | None = None
    only_timed: int = 0

    @property
    def gained_s(self) -> float:
        """Seconds that tuned choices have saved in all calls of all problems."""
        return sum(stats.gained_s for stats in self.problems)

    @property
    def gained_share(self) -> float | None:
        """Share of torch's time that was saved, over the convolutions with known times; None if there are none."""
        torch_s = sum(stats.calls * (stats.decision.baseline_s or 0.0) for stats in self.problems)
        return self.gained_s / torch_s if torch_s else None

    def __str__(self) -> str:
        """Return a text table of 100 columns: a row for each shape, totals, and the reasons why calls are not tuned."""
        never = [filled(f"never tuned, {n} shape{'s' * (n != 1)} of call: {why}") for why, n in self.passed_by]
        if not self.problems:
            return "\n".join((self.in_one_line() if self.only_timed else _NOTHING, *never))
        operations = (str(operation).replace("_", " ") for operation in Operation)
        columns = [Column(title) for title in ("convolution", "calls", *operations)]
        decisions = [stats.decision for stats in self.problems]
        reasons = Counter(decision.why for decision in decisions if decision.origin is Origin.NONE)
        whys = [f"PyTorch's own in {n} of {len(self.problems)} problems: {why}" for why, n in reasons.items()]
        caption = "\n".join([*map(filled, (*self._totals(), *whys)), *never])
        return Table("", columns, [*self._rows()], caption=caption).text()

    def in_one_line(self) -> str:
        """Return the number of tuned problems and the time saved, in one line."""
        if not self.problems:
            timed = f"calls of {self.only_timed} shapes took too little time to be worth tuning"
            return timed if self.only_timed else "no convolution of PyTorch was called"
        return "; ".join(self._totals())

    def to_frame(self) -> pandas.DataFrame:
        """Return a data frame with a row for each problem: geometry, calls, choice and reason, seconds."""
        import pandas

        rows = [
            asdict(stats.problem)
            | {
                "batch_size": stats.batch_size,
                "device": str(stats.device),
                "threads": stats.threads,
                "configuration": str(stats.decision.configuration or ""),
                "calls": stats.calls,
                "ours": stats.ours,
                "origin": stats.decision.origin,
                "baseline_s": stats.decision.baseline_s,
                "time_s": stats.decision.time_s,
                "gained_s": stats.gained_s,
                "why": stats.decision.why,
            }
            for stats in self.problems
        ]
        return pandas.DataFrame(rows)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of a table row for each geometry and batch size."""
        shapes = grouped(
            ((stats.problem.with_operation(Operation.FORWARD), stats.batch_size, stats.device, stats.threads), stats)
            for stats in self.problems
        )
        for (problem, batch_size, _, _), sizes in shapes.items():
            cells = {stats.problem.operation: _cell(stats.decision) for stats in sizes}
            calls = max(stats.calls for stats in sizes)
            # such as ``64x56x56 -> 64, 3x3, padding 1x1, batch 8``; dtype and format if not the defaults
            words = str(problem).removeprefix(f"{problem.operation} ").removesuffix(", float32 contiguous")
            yield f"{words}, batch {batch_size}", str(calls), *(cells.get(operation, "") for operation in Operation)

    def _totals(self) -> Iterator[str]:
        origins = Counter(stats.decision.origin for stats in self.problems)
        counts = ", ".join(f"{origins[origin]} {origin}" for origin in Origin if origins[origin])
        number = len(self.problems)
        yield f"{number} problem{'s' * (number != 1)}: {counts}; tuning took {format_seconds(self.spent_s)}"
        if self.gained_share is not None:
            yield (
                f"gained {format_seconds(self.gained_s)} so far, {self.gained_share:.0%} of PyTorch's time for these "
                "convolutions, by the times measured in tuning"
            )
        if self.only_timed:
            yield f"calls of {self.only_timed} more shapes took too little time to be worth tuning"
        if self.heap is not None:
            yield f"the heap is {self.heap}"


def _cell(decision: Decision) -> str:
    """Return the cell of a choice, with ``~`` if it is the nearest size's."""
    if decision.configuration is None:
        return "PyTorch, untuned"
    speedup = "" if decision.time_s is None else speedup_cell(decision.baseline_s, decision.time_s)
    is_nearest = decision.origin is Origin.NEAREST and not decision.configuration.is_baseline
    return f"{'~' * is_nearest}{choice_cell(decision.configuration, speedup)}"
