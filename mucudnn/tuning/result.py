"""Results of tuning: the choices for all problems, printed, as JSON and as a data frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mucudnn.core.answers import TunedProblem, row_of
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Configuration, Environment
from mucudnn.solver.front import desirable_sets

if TYPE_CHECKING:
    import pandas

    from mucudnn.core.records import Task
    from mucudnn.solver.division import Division


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of ``tune``, which can be printed, and which modules such as ``mucudnn.Conv2d`` run.

    division: the division of the workspace budget; None if every problem has its own limit.
    """

    config: Config
    environment: Environment
    problems: tuple[TunedProblem, ...] = field(default=())
    division: Division[Task] | None = None

    def __getitem__(self, problem: ConvProblem) -> TunedProblem:
        """Return the choice for a problem. Raises ``InvalidInputError`` for a problem that was not tuned."""
        for tuned in self.problems:
            if tuned.problem == problem:
                return tuned
        raise InvalidInputError(f"{problem} is not in this tuning; it has {len(self.problems)} other problems")

    def configurations(self, problem: ConvProblem) -> Mapping[int, Configuration]:
        """Return the configuration to run by batch size, up to the tuned one: see ``configurations_of``.

        Raises ``InvalidInputError`` for a problem that was not tuned.
        """
        return configurations_of(self[problem])

    def __str__(self) -> str:
        if not self.problems:
            return "nothing was tuned"
        division = [] if self.division is None else [str(self.division)]
        return "\n".join((f"on {self.environment}", *map(str, self.problems), *division))

    def to_json(self) -> dict[str, Any]:
        """Return all results as plain values for ``json.dumps``, in seconds and bytes."""
        return {
            "environment": asdict(self.environment),
            "workspace_limit": self.config.workspace_limit,
            "problems": [tuned.to_json() for tuned in self.problems],
            "division": None if self.division is None else self.division.to_json(),
        }

    def to_frame(self) -> pandas.DataFrame:
        """Return a table with a row for each problem: its geometry, the chosen configuration, seconds and bytes."""
        import pandas

        return pandas.DataFrame([row_of(tuned) for tuned in self.problems])


def configurations_of(tuned: TunedProblem) -> Mapping[int, Configuration]:
    """Return the configuration to run by batch size, up to the tuned batch size, within the problem's workspace limit.

    The tuned batch size has the verified configuration. Smaller sizes have the fastest configuration by the same
    measurements, without those refuted by whole runs. If torch's own was chosen, smaller batch sizes are left out.
    """
    chosen = {tuned.batch_size: tuned.configuration}
    if tuned.configuration.is_baseline:
        return chosen
    sets = desirable_sets(tuned.allowed_measurements, tuned.batch_size)
    smaller = ((n, sets.fastest(n, tuned.limit_bytes)) for n in range(1, tuned.batch_size))
    kept = {n: c for n, c in smaller if c is not None and c.micro_configs not in tuned.refuted}
    return kept | chosen


class TuningInterrupted(KeyboardInterrupt):
    """Ctrl-C during tuning. ``partial`` has the problems tuned so far; all measurements so far are stored."""

    def __init__(self, partial: Tuning) -> None:
        super().__init__(f"tuning was interrupted; {len(partial.problems)} problems are ready")
        self.partial = partial
