"""Algorithms that a config permits, of those that a machine has."""

from __future__ import annotations

from collections.abc import Sequence

from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.measuring.whole_runs import Machine
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import source_of
from mucudnn.words.torch_settings import TORCHS_OWN


def permitted_algorithms(
    machine: Machine, config: Config, problem: ConvProblem | None = None, sizes: Sequence[int] = ()
) -> list[Algorithm]:
    """Return the algorithms that a config allows; for a problem those that sources offer, too, and that are strict.

    Raises ``InvalidInputError`` for unknown names.
    """
    algorithms = _of_every_problem(machine, config)
    if problem is None:
        return algorithms
    offered = (algorithm for source in machine.sources for algorithm in source.offered(problem, sizes))
    every = (*algorithms, *(algorithm for algorithm in offered if _is_allowed(algorithm, config)))
    return [algorithm for algorithm in every if _is_strict_enough(algorithm, problem, config)]


def _of_every_problem(machine: Machine, config: Config) -> list[Algorithm]:
    """Return the machine's algorithms for every problem that a config allows.

    Raises ``InvalidInputError`` for unknown names.
    """
    names = [algorithm.name for algorithm in machine.algorithms]
    sources = [source.name for source in machine.sources]
    if unknown := [name for name in config.algorithms or () if source_of(name) not in (TORCHS_OWN, *names, *sources)]:
        there_are = ", ".join((*names, *sources))
        raise InvalidInputError(f"algorithms has {', '.join(unknown)}; this machine has {there_are}")
    return [algorithm for algorithm in machine.algorithms if _is_allowed(algorithm, config)]


def _is_allowed(algorithm: Algorithm, config: Config) -> bool:
    """Whether name or source are asked for, and its determinism is enough. Torch's own always is allowed."""
    name = algorithm.name
    named = config.algorithms is None or bool({name, source_of(name)} & {TORCHS_OWN, *config.algorithms})
    return named and (algorithm.deterministic or name == TORCHS_OWN or not config.deterministic)


def _is_strict_enough(algorithm: Algorithm, problem: ConvProblem, config: Config) -> bool:
    """Whether it is local, or that is not asked for. Torch's own always is strict enough."""
    return not config.strict or algorithm.name == TORCHS_OWN or algorithm.is_local(problem)
