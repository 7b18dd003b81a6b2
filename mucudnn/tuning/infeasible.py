"""Errors for workspace limits that no configuration fits: the convolutions concerned, and the smallest workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from mucudnn.core.errors import InfeasibleError
from mucudnn.core.records import Failure, Measurement, Task, source_of
from mucudnn.core.values import exact_bytes, format_bytes
from mucudnn.solver.front import desirable_sets

_Failed = Mapping[Task, Sequence[Failure]]
_NEEDS_NOTHING = "allow the algorithm loop-nest, which needs no workspace (compiled, on the CPU)"


def smallest_bytes(measurements: Sequence[Measurement], batch_size: int) -> int | None:
    """Return the smallest workspace of a configuration of these measurements; None if none covers the batch."""
    smallest = desirable_sets(measurements, batch_size).smallest(batch_size) if measurements else None
    return None if smallest is None else smallest.workspace_bytes


def infeasible(smallest: Mapping[Task, int | None], failed: _Failed | None = None) -> InfeasibleError:
    """Return one error for all tasks that have no configuration within their limit, with their smallest workspaces.

    failed: the failures of each task's candidates, which the smallest workspaces ignore.
    """
    lines = [
        f"  {task}, batch {task.batch_size}, limit {format_bytes(task.limit_bytes)}: {_at_least(needed)}"
        f"{_but_for(task, failed)}"
        for task, needed in smallest.items()
    ]
    needed = [size for size in smallest.values() if size is not None]
    most = max(needed) if len(needed) == len(smallest) else None
    raised = [] if most is None else [f"raise the workspace limit to {exact_bytes(most)} or more"]
    advice = _either(*raised, _NEEDS_NOTHING)
    return InfeasibleError("\n".join(("no configuration fits the workspace limit:", *lines, advice)), most)


def unaffordable(
    smallest: Mapping[Task, int | None], budget_bytes: int | None, failed: _Failed | None = None
) -> InfeasibleError:
    """Return one error for a budget too small for all tasks together, with the most demanding tasks first.

    failed: as for ``infeasible``.
    """
    ranked = sorted(smallest.items(), key=lambda item: -(inf if item[1] is None else item[1]))
    lines = [
        f"  {task}, batch {task.batch_size}: {_at_least(needed)}{_but_for(task, failed)}"
        for task, needed in ranked
        if needed != 0
    ]
    needed = [size for size in smallest.values() if size is not None]
    total = sum(needed) if len(needed) == len(smallest) else None
    raised = [] if total is None else [f"raise the workspace budget to {exact_bytes(total)} or more"]
    what = f"no division fits the workspace budget of {format_bytes(budget_bytes)} over {len(smallest)} problems:"
    return InfeasibleError("\n".join((what, *lines, _either(*raised, _NEEDS_NOTHING))), total)


def _either(*remedies: str) -> str:
    text = ", or ".join(remedies)
    return text[0].upper() + text[1:]


def _but_for(task: Task, failed: _Failed | None) -> str:
    """List a task's failed candidates, only the smallest of each algorithm, since larger ones fail likewise.

    Stored failures of algorithms from an ``AlgorithmSource`` are not retried.
    """
    failures = sorted((failed or {}).get(task, ()), key=lambda failure: failure.micro_config, reverse=True)
    first = {failure.micro_config.algorithm: failure for failure in failures}
    names = sorted(first)
    lines = [f"    {name} {first[name].micro_config.micro_batch_size} failed: {first[name].reason}" for name in names]
    if any(source_of(name) != name for name in names):
        lines.append("    stored failures are not tried again; Config(database=...) with a new file tries all")
    return "".join(f"\n{line}" for line in lines)


def _at_least(needed: int | None) -> str:
    return "no algorithm can compute it" if needed is None else f"at least {exact_bytes(needed)}"
