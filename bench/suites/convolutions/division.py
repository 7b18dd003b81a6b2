"""Tuning of all problems of a table together, which is done before the problems are timed one by one."""

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

OURS, DIVIDED = "mucudnn", "mucudnn-wd"


@dataclass(frozen=True, slots=True)
class TunedNetwork:
    """The configurations chosen together for all problems of a table. bytes: the limit or budget, None for no limit.

    choices: by layer and problem; empty if tuning failed, with the reason in ``failure``.
    """

    contestant: str
    policy: BatchSizePolicy
    bytes: int | None
    choices: Mapping[tuple[tuple[str, ...], ConvProblem], TunedProblem]
    failure: str = ""

    def chosen(self, layer: Layer, problem: ConvProblem) -> TunedProblem | str:
        """Return the tuned problem with the configuration chosen for it, or the reason why none was chosen."""
        return self.choices.get((layer.names, problem), self.failure)


@dataclass(frozen=True, slots=True)
class NetworkTuner:
    """A tuner of all problems of a table together, on one machine and with one database of measurements."""

    table: LayerTable
    config: Config
    machine: Machine
    database: Database
    priors: Priors

    def as_configured(self, progress: Progress) -> TunedNetwork:
        """Tune the table under the config's own policy and limits. Raises the errors of ``tune``."""
        size = self.config.workspace_limit_bytes
        return TunedNetwork(OURS, BatchSizePolicy(self.config.policy), size, self._choices(self.config, progress))

    def divisions(
        self, policies: Sequence[BatchSizePolicy], budgets: Sequence[int], progress: Progress
    ) -> Iterator[TunedNetwork]:
        """Tune the table under each policy and workspace budget (bytes), which is divided over all problems.

        Raises ``KeyboardInterrupt``.
        """
        wanted = [(policy, budget) for policy in policies for budget in budgets]
        for index, (policy, budget) in enumerate(wanted):
            one = replace(self.config, policy=policy, workspace_limit=DEFAULT_WORKSPACE_LIMIT, workspace_budget=budget)
            part = share_of(progress, index / len(wanted), 1 / len(wanted))
            try:
                yield TunedNetwork(DIVIDED, policy, budget, self._choices(one, part))
            except InfeasibleError as error:
                yield TunedNetwork(DIVIDED, policy, budget, {}, " ".join(str(error).split()))

    def _choices(
        self, config: Config, progress: Progress
    ) -> Mapping[tuple[tuple[str, ...], ConvProblem], TunedProblem]:
        tuning = tune_tasks(
            *(table_tasks(self.table, config), config),
            progress=progress,
            machine=self.machine,
            database=self.database,
            priors=self.priors,
        )
        return {(row.names, row.tuned.problem): row.tuned for row in of_table(self.table, tuning).rows}
