"""Divides one budget over all problems of a table (the paper's WD), before they are timed one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.sources.table_tuning import of_table, table_tasks
from mucudnn.database.database import Database
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning.result import TunedProblem
from mucudnn.tuning.tuner import Priors, tune_tasks
from mucudnn.words.config import DEFAULT_WORKSPACE_LIMIT, BatchSizePolicy, Config
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.progress import Progress, share_of


@dataclass(frozen=True, slots=True)
class NetworkDivision:
    """A budget (bytes) divided over a network under a policy. choices: by layer and problem; empty: ``failure``."""

    policy: BatchSizePolicy
    budget_bytes: int
    choices: Mapping[tuple[tuple[str, ...], ConvProblem], TunedProblem]
    failure: str = ""

    def chosen(self, layer: Layer, problem: ConvProblem) -> TunedProblem | str:
        """Return what was chosen for a problem, or the reason why there is nothing."""
        return self.choices.get((layer.names, problem), self.failure)


def divisions(
    table: LayerTable,
    config: Config,
    policies: Sequence[BatchSizePolicy],
    budgets: Sequence[int],
    machine: Machine,
    database: Database,
    priors: Priors,
    progress: Progress,
) -> Iterator[NetworkDivision]:
    """Divide each budget (bytes) under each policy. Raises ``KeyboardInterrupt``, as tuning does."""
    wanted = [(policy, budget) for policy in policies for budget in budgets]
    for index, (policy, budget) in enumerate(wanted):
        one = replace(config, policy=policy, workspace_limit=DEFAULT_WORKSPACE_LIMIT, workspace_budget=budget)
        part = share_of(progress, index / len(wanted), 1 / len(wanted))
        try:
            tuning = tune_tasks(
                table_tasks(table, one), one, progress=part, machine=machine, database=database, priors=priors
            )
        except InfeasibleError as error:
            yield NetworkDivision(policy, budget, {}, " ".join(str(error).split()))
        else:
            rows = of_table(table, tuning).rows
            yield NetworkDivision(policy, budget, {(row.names, row.tuned.problem): row.tuned for row in rows})
