"""Report of the comparison under workspace limits: a table and words for people, CSV and JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table

from mucudnn.bench.report.records import Record, key_of, record_header
from mucudnn.bench.report.tables import new_table, ratio
from mucudnn.bench.suites.limits.result import (
    FLOOR_BYTES,
    WITHIN,
    ComparedProblem,
    LimitsComparison,
    Run,
    UnderLimit,
    mean,
)
from mucudnn.words.problem import ConvProblem
from mucudnn.words.units import format_bytes


def _ratio(value: float | None) -> str:
    return "" if value is None else ratio(value)


_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {  # heading -> key of the record, and how it is shown
    "rival / ours, geometric mean": ("geometric_mean", _ratio),
    "least": ("least", _ratio),
    "most": ("most", _ratio),
    "problems": ("problems", str),
    "no rival within": ("without_rival", str),
    "nothing of ours within": ("without_ours", str),
}


def limits_table(comparison: LimitsComparison) -> Table:
    """Tell for each limit how much faster ours is than the best undivided rival, and how many problems have none."""
    title = f"{comparison.source}, ours against the best undivided of {comparison.rivals}"
    printed = new_table(title, ("workspace limit",), [*_COLUMNS])
    for limit in comparison.limits:
        row = _limit_record(comparison, limit)
        printed.add_row(format_bytes(limit), *(shown(row[key]) for key, shown in _COLUMNS.values()))
    return printed


def in_words(comparison: LimitsComparison) -> str:
    """Tell how much was done, the best limit, and the two comparisons with torch."""
    done = f"{len(comparison.problems)} of {comparison.wanted} problems"
    lines = [done if comparison.is_complete else f"{done}: the others were not reached, or failed"]
    lines += [f"failed: {failed.task}: {failed.reason}" for failed in comparison.failed]
    if comparison.problems:
        lines += [_best_limit_in_words(comparison), _workspace_in_words(comparison), _speedup_in_words(comparison)]
    return "\n".join(lines)


def limits_record(comparison: LimitsComparison) -> Record:
    """The object that ``mucudnn bench limits --json`` writes: the summary, and what it was made with."""
    return {
        **record_header(comparison.config, comparison.environment, comparison.date),
        "source": comparison.source,
        "rounds": comparison.rounds,
        "wanted": comparison.wanted,
        "done": len(comparison.problems),
        "complete": comparison.is_complete,
        "failed": [{"problem": str(failed.task), "reason": failed.reason} for failed in comparison.failed],
        "rivals": comparison.rivals,
        "limits": [_limit_record(comparison, limit) for limit in comparison.limits],
        "best_limit_bytes": comparison.best_limit,
        "reference": comparison.reference,
        "workspace_for_the_same_time": _workspace_record(comparison),
        "speedup_without_limit": {
            name: _spread([p.speedup_over(name) for p in comparison.problems]) for name in comparison.torch_variants
        },
    }


def limits_rows(comparison: LimitsComparison) -> list[Record]:
    """Lines of the CSV file: one for each problem and limit, empty where there is none. Seconds and bytes."""
    return [row for problem in comparison.problems for row in _csv_rows(problem, comparison.reference)]


def _limit_record(comparison: LimitsComparison, limit_bytes: int | None) -> Record:
    under, gains = comparison.under(limit_bytes), comparison.gains(limit_bytes)
    return {
        "limit_bytes": limit_bytes,
        "geometric_mean": mean(gains),
        "least": min(gains, default=None),
        "most": max(gains, default=None),
        "problems": len(gains),
        "without_rival": sum(one.rival is None for one in under),
        "without_ours": sum(one.ours is None for one in under),
    }


def _workspace_record(comparison: LimitsComparison) -> Record:
    """Ratios of workspaces, theirs / ours; bytes below the floor count as the floor."""
    same = [problem.same_time for problem in comparison.problems]
    ours = [one.ours.workspace_bytes for one in same if one.ours is not None]
    theirs = [one.theirs_bytes for one in same if one.ours is not None]
    return {
        "within": WITHIN,
        "geometric_mean": mean(comparison.workspace_ratios),
        "problems": len(ours),
        "not_as_fast": len(same) - len(ours),
        "floor_bytes": FLOOR_BYTES,
        "theirs_below_floor": sum(size < FLOOR_BYTES for size in theirs),
        "theirs_zero": theirs.count(0),
        "ours_below_floor": sum(size < FLOOR_BYTES for size in ours),
        "ours_zero": ours.count(0),
        "both_below_floor": sum(max(pair) < FLOOR_BYTES for pair in zip(theirs, ours, strict=True)),
    }


def _spread(ratios: Sequence[float]) -> Record:
    return {
        "geometric_mean": mean(ratios),
        "least": min(ratios, default=None),
        "median": median(ratios) if ratios else None,
    }


def _best_limit_in_words(comparison: LimitsComparison) -> str:
    best = comparison.best_limit
    if best is None:
        return "none of the limits leaves both a rival and ours"
    gain = _ratio(mean(comparison.gains(best)))
    return f"best limit: {format_bytes(best)}, where ours is {gain} as fast as the best undivided rival"


def _workspace_in_words(comparison: LimitsComparison) -> str:
    told = _workspace_record(comparison)
    return (
        f"workspace for the time of {comparison.reference} within {WITHIN:.0%}: theirs / ours "
        f"{_ratio(told['geometric_mean'])} (geometric mean of {told['problems']} problems; in {told['not_as_fast']} "
        f"more nothing of ours is as fast); less than {format_bytes(FLOOR_BYTES)} counts as that: theirs in "
        f"{told['theirs_below_floor']} ({told['theirs_zero']} of them nothing), ours in {told['ours_below_floor']} "
        f"({told['ours_zero']} of them nothing), both in {told['both_below_floor']}"
    )


def _speedup_in_words(comparison: LimitsComparison) -> str:
    told = _spread(comparison.speedups)
    return (
        f"without a limit, ours against {comparison.reference}: {_ratio(told['geometric_mean'])} (geometric mean), "
        f"least {_ratio(told['least'])}, median {_ratio(told['median'])}"
    )


def _csv_rows(compared: ComparedProblem, reference: str) -> Iterator[Record]:
    same, task = compared.same_time, compared.task
    layer = task.name.removesuffix(f", {task.problem}")
    of_problem: Record = {"layer": layer, "count": task.count, **_geometry(task.problem), "batch_size": task.batch_size}
    torchs: Record = {}
    for name, cell in compared.torch.items():
        torchs |= {f"{key_of(name)}_s": cell.time_s, f"{key_of(name)}_noise": cell.noise}
    same_time = {
        "reference": reference,
        "reference_workspace_bytes": same.theirs_bytes,
        **_run("as_fast", same.ours),
        "workspace_ratio": same.ratio,
    }
    for under in compared.under:
        yield {**of_problem, **_under(under), **torchs, **same_time}


def _geometry(problem: ConvProblem) -> Record:
    """Fields of the problem, pairs in two columns: ``padding_h``, ``padding_w``."""
    plain = {name: value for name, value in asdict(problem).items() if not isinstance(value, tuple)}
    pairs = {name: value for name, value in asdict(problem).items() if isinstance(value, tuple)}
    return plain | {f"{name}_{axis}": v for name, pair in pairs.items() for axis, v in zip("hw", pair, strict=True)}


def _under(under: UnderLimit) -> Record:
    return {
        "limit_bytes": under.limit_bytes,
        **_run("rival", under.rival),
        **_run("mucudnn", under.ours),
        "rival_over_mucudnn": under.gain,
    }


def _run(name: str, run: Run | None) -> Record:
    """Columns of one run; empty where there is none."""
    values = (
        (None,) * 5
        if run is None
        else (str(run.configuration), run.workspace_bytes, run.configuration.time_s, run.time_s, run.measured.noise)
    )
    names = ("configuration", "workspace_bytes", "predicted_s", "s", "noise")
    return {f"{name}_{column}": value for column, value in zip(names, values, strict=True)}
