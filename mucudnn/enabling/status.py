"""The result of ``status``: problems since ``enable``, with number of calls, choice, reason and time saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
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


@dataclass(slots=True, eq=False)
class ShapeStats:
    """Statistics of one problem with its batch size on one device, with one number of threads.

    calls: number of calls. ours: number of calls that did not run torch's convolution. ask_at: number of calls at which
    the next decision is due, or inf if there is none. call_s: least seconds of a timed call, before tuning. choices:
    the choices to run; None for torch's convolution. tuned: the result of tuning this exact size. baseline_s, time_s:
    seconds per call, torch's and ours; estimates if derived from the nearest size, None if unknown.
    """

    problem: ConvProblem
    batch_size: int
    device: torch.device
    threads: int
    calls: int = 0
    ours: int = 0
    ask_at: float = 1
    call_s: float = inf
    origin: Origin = Origin.NONE
    why: str = ""
    choices: Choices | None = None
    configuration: Configuration | None = None
    tuned: TunedProblem | None = None
    baseline_s: float | None = None
    time_s: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether this size was tuned, or cannot be."""
        return self.tuned is not None or self.ask_at == inf

    @property
    def layer(self) -> tuple[object, ...]:
        """Key of the layer: everything in the problem but the batch size, the height and the width."""
        p = self.problem
        geometry = (p.stride, p.padding, p.dilation, p.groups)
        kind = (p.operation, p.c, p.k, p.r, p.s, *geometry, p.dtype, p.memory_format)
        return *kind, self.device, self.threads

    def use(self, tuned: TunedProblem, origin: Origin) -> None:
        """Run, from now on, the choice made for this exact size. origin: where the choice comes from."""
        self.tuned, self.origin, self.why, self.ask_at = tuned, origin, tuned.reason, inf
        self.baseline_s, self.time_s = tuned.baseline_s, tuned.time_s
        self._run(tuned.configuration, tuned.limit_bytes)

    def use_nearest(self, configuration: Configuration, of: TunedProblem) -> None:
        """Run, from now on, a configuration derived from ``of``, the choice for another size.

        Times are scaled by the FLOPs.
        """
        share = self.problem.flops(self.batch_size) / of.problem.flops(of.batch_size)
        self.origin = Origin.NEAREST
        self.why = f"as for {of.problem.h}x{of.problem.w}, batch {of.batch_size}"
        self.baseline_s = None if of.baseline_s is None else of.baseline_s * share
        self.time_s = of.time_s * share
        self._run(configuration, of.limit_bytes)

    def use_torchs_own(self, why: str, *, for_good: bool = False) -> None:
        """Run torch's convolution. for_good: whether no further decision is due."""
        if for_good:
            self.ask_at = inf
        self.origin, self.why, self.choices, self.configuration = Origin.NONE, why, None, None
        self.baseline_s = self.time_s = None

    def _run(self, configuration: Configuration, limit_bytes: int | None) -> None:
        """Set the configuration that runs, and drop the executables of the previous one."""
        self.configuration = configuration
        chosen = {self.problem: {self.batch_size: configuration}}
        self.choices = None if configuration.is_baseline else Choices(chosen, self.device.type, limit_bytes=limit_bytes)

    @property
    def gained_s(self) -> float:
        """Seconds saved in all calls that ran the tuned choice, by the times measured in tuning."""
        return 0.0 if self.baseline_s is None or self.time_s is None else self.ours * (self.baseline_s - self.time_s)


@dataclass(frozen=True, slots=True)
class Status:
    """Snapshot of the problems under one config. It prints as a table; ``to_frame()`` has every problem.

    spent_s: time spent on tuning. passed_by: reasons why calls are never tuned, with the number of shapes of such
    calls. heap: whether a kept heap was worth it, and why; None if that is not known, or was not tried.
    """

    problems: tuple[ShapeStats, ...] = ()
    spent_s: float = 0.0
    passed_by: tuple[tuple[str, int], ...] = ()
    heap: str | None = None

    @property
    def gained_s(self) -> float:
        """Seconds that tuned choices have saved in all calls of all problems."""
        return sum(one.gained_s for one in self.problems)

    @property
    def gained_share(self) -> float | None:
        """Share of torch's time that was saved, over the convolutions with known times; None if there are none."""
        known = [one for one in self.problems if one.baseline_s is not None]
        torch_s = sum(one.calls * one.baseline_s for one in known if one.baseline_s is not None)
        return self.gained_s / torch_s if torch_s else None

    def __str__(self) -> str:
        """Return a text table of 100 columns: a row for each shape, totals, and the reasons why calls are not tuned."""
        never = [filled(f"never tuned, {n} shape{'s' * (n != 1)} of call: {why}") for why, n in self.passed_by]
        if not self.problems:
            return "\n".join((_NOTHING, *never))
        operations = (str(operation).replace("_", " ") for operation in Operation)
        columns = [Column(title) for title in ("convolution", "calls", *operations)]
        reasons = Counter(one.why for one in self.problems if one.origin is Origin.NONE)
        whys = [f"PyTorch's own in {n} of {len(self.problems)} problems: {why}" for why, n in reasons.items()]
        caption = "\n".join([*map(filled, (*self._totals(), *whys)), *never])
        return Table("", columns, [*self._rows()], caption=caption).text()

    def in_one_line(self) -> str:
        """Return the number of tuned problems and the time saved, in one line."""
        if not self.problems:
            return "no convolution of PyTorch was called"
        return "; ".join(self._totals())

    def to_frame(self) -> pandas.DataFrame:
        """Return a data frame with a row for each problem: geometry, calls, choice and reason, seconds."""
        import pandas

        rows = []
        for one in self.problems:
            shape = {"batch_size": one.batch_size, "device": str(one.device), "threads": one.threads}
            chosen = {"configuration": "" if one.configuration is None else str(one.configuration)}
            names = ("calls", "ours", "origin", "baseline_s", "time_s", "gained_s", "why")
            rows.append(asdict(one.problem) | shape | chosen | {name: getattr(one, name) for name in names})
        return pandas.DataFrame(rows)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of a table row for each geometry and batch size."""
        shapes = grouped(
            ((one.problem.with_operation(Operation.FORWARD), one.batch_size, one.device, one.threads), one)
            for one in self.problems
        )
        for every in shapes.values():
            of_shape = {one.problem.operation: one for one in every}
            first, calls = every[0], max(one.calls for one in every)
            # such as ``64x56x56 -> 64, 3x3, padding 1x1, batch 8``; dtype and format if not the defaults
            words = str(first.problem).removeprefix(f"{first.problem.operation} ").removesuffix(", float32 contiguous")
            cells = (_cell(of_shape.get(operation)) for operation in Operation)
            yield f"{words}, batch {first.batch_size}", str(calls), *cells

    def _totals(self) -> Iterator[str]:
        origins = Counter(one.origin for one in self.problems)
        counts = ", ".join(f"{origins[origin]} {origin}" for origin in Origin if origins[origin])
        number = len(self.problems)
        yield f"{number} problem{'s' * (number != 1)}: {counts}; tuning took {format_seconds(self.spent_s)}"
        if self.gained_share is not None:
            yield (
                f"gained {format_seconds(self.gained_s)} so far, {self.gained_share:.0%} of PyTorch's time for these "
                "convolutions, by the times measured in tuning"
            )
        if self.heap is not None:
            yield f"the heap is {self.heap}"


def _cell(one: ShapeStats | None) -> str:
    """Return the cell of a choice, with ``~`` if it is the nearest size's; empty if never called."""
    if one is None:
        return ""
    if one.configuration is None:
        return "PyTorch, untuned"
    speedup = "" if one.time_s is None else speedup_cell(one.baseline_s, one.time_s)
    is_nearest = one.origin is Origin.NEAREST and not one.configuration.is_baseline
    return f"{'~' * is_nearest}{choice_cell(one.configuration, speedup)}"
