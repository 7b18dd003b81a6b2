"""Tells what was measured again: tables for people."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from rich.table import Table

from mucudnn.bench.report.tables import new_table
from mucudnn.tuning.choose import is_gain
from mucudnn.tuning.refresh import Again, Refreshed, has_turned
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Measurement, WholeRun


def refresh_in_words(refreshed: Refreshed) -> str:
    """Say how much was measured again, how many verdicts turned, and what is left."""
    if not refreshed.doubtful:
        return f"nothing is doubtful on {refreshed.environment}"
    again = len(refreshed.measurements) + len(refreshed.whole_runs)
    turned = sum(has_turned(run) for run in refreshed.whole_runs)
    parts = [
        f"{again} of {refreshed.doubtful} measured again: {len(refreshed.measurements)} measurements, "
        f"{len(refreshed.whole_runs)} whole runs, {turned} verdicts turned"
    ]
    if refreshed.disturbed:
        parts.append(f"{refreshed.disturbed} disturbed again")
    if refreshed.passed_over:
        parts.append(f"{refreshed.passed_over} passed over: they cannot win, failed, or cannot run here")
    if refreshed.left:
        parts.append(f"{refreshed.left} left as they were")
    return "; ".join(parts)


def measurements_table(refreshed: Refreshed) -> Table:
    """Per problem: how many micro-configs were measured again, and their times now over those before."""
    of_problem: dict[ConvProblem, list[Again[Measurement]]] = defaultdict(list)
    for one in refreshed.measurements:
        of_problem[one.problem].append(one)
    printed = new_table("Measured again", ("problem",), ("measurements", "time now / before", "least", "most"))
    for problem, several in of_problem.items():
        ratios = [one.now.step_s / one.before.step_s for one in several if one.before.step_s]
        ratios = ratios or [1.0]
        cells = (median(ratios), min(ratios), max(ratios))
        printed.add_row(str(problem), str(len(several)), *(f"{ratio:.2f}" for ratio in cells))
    return printed


def whole_runs_table(refreshed: Refreshed) -> Table:
    """Per whole run: torch's time and its own, before and now, and the verdict."""
    columns = ("PyTorch ms before", "now", "its own ms before", "now", "speedup before", "now")
    printed = new_table("Whole runs again", ("problem", "configuration", "verdict"), columns)
    for run in refreshed.whole_runs:
        times = (run.before.baseline_s, run.now.baseline_s, run.before.time_s, run.now.time_s)
        cells = (*(f"{1000 * time_s:.3f}" for time_s in times), _speedup(run.before), _speedup(run.now))
        printed.add_row(str(run.problem), str(run.of), _verdict(run), *cells)
    return printed


def _speedup(run: WholeRun) -> str:
    return f"{run.speedup:.2f} ± {run.noise:.2f}"


def _verdict(run: Again[WholeRun]) -> str:
    now = "faster" if is_gain(run.now) else "not faster"
    return f"{now}, as before" if not has_turned(run) else f"{now}: turned"
