"""Configurations for sizes that were not tuned, derived from the choice for the nearest size of the same layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, log

from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.measuring.candidates import is_foreign
from mucudnn.running.executable import Executable
from mucudnn.solver.front import desirable_sets
from mucudnn.tuning.result import TunedProblem, configurations_of
from mucudnn.words.errors import InvalidInputError, LibraryError, UnavailableError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.torch_settings import TORCHS_OWN

# Speedups change slowly with the size. These limits exclude those that may not hold at the other size.
_LEAST_SPEEDUP = 1.1
_MOST_TIMES_PIXELS = 2.0


def nearest(
    problem: ConvProblem, batch_size: int, tuned: Sequence[TunedProblem], device_type: str
) -> tuple[Configuration, TunedProblem] | None:
    """Return a configuration for this size and the tuned size that it derives from, or None to run torch's convolution.

    tuned: the sizes of the same layer that were tuned. For another batch size, the stored measurements are solved
    again. For another image size, the algorithm that won at the nearest size is used if it won clearly, can compute the
    problem, and is within the limit.
    """
    same = [one for one in tuned if one.problem == problem]
    if same:
        of = min(same, key=lambda one: _distance(batch_size, one.batch_size))
        configuration = _at_batch_size(of, batch_size)
    else:
        near = [one for one in tuned if _pixels_apart(problem, one.problem) <= log(_MOST_TIMES_PIXELS)]
        if not near:
            return None
        of = min(near, key=lambda one: (_pixels_apart(problem, one.problem), _distance(batch_size, one.batch_size)))
        configuration = _at_other_images(problem, batch_size, of, device_type)
    return None if configuration is None else (configuration, of)


def _at_batch_size(of: TunedProblem, n: int) -> Configuration | None:
    """Choose for another batch size from the stored measurements.

    Returns None if ``of`` runs torch's undivided convolution. Also returns None if the choice for ``n`` would be
    torch's convolution in micro-batches, since these were not compared with the undivided convolution for ``n``.
    """
    if of.configuration.is_baseline:
        return None
    if n <= of.batch_size:
        found = configurations_of(of).get(n)
    else:
        found = desirable_sets(of.allowed_measurements, n).fastest(n, of.limit_bytes)
    return None if found is None or (n != of.batch_size and found.algorithms == (TORCHS_OWN,)) else found


def _at_other_images(problem: ConvProblem, n: int, of: TunedProblem, device_type: str) -> Configuration | None:
    won = of.configuration
    if won.is_baseline or of.speedup is None or of.speedup < _LEAST_SPEEDUP or len(won.algorithms) > 1:
        return None
    (name,) = won.algorithms
    time_s = of.time_s * problem.flops(n) / of.problem.flops(of.batch_size)
    limit = inf if of.limit_bytes is None else of.limit_bytes
    largest = max(part.micro_batch_size for part in won.micro_configs)
    for micro_configs in _cuts(name, n, min(largest, n)):
        configuration = Configuration(micro_configs, time_s, 0)
        workspace_bytes = _workspace_bytes(problem, configuration, device_type)
        if workspace_bytes is not None and workspace_bytes <= limit:
            return Configuration(micro_configs, time_s, workspace_bytes)
    return None


def _cuts(name: str, n: int, largest: int) -> Iterator[tuple[MicroConfig, ...]]:
    """Yield divisions of the batch into micro-batches of one size and a remainder, with ever smaller sizes (halved)."""
    while largest:
        rest = (MicroConfig(name, n % largest),) if n % largest else ()
        yield (MicroConfig(name, largest),) * (n // largest) + rest
        largest //= 2


def _workspace_bytes(problem: ConvProblem, configuration: Configuration, device_type: str) -> int | None:
    """Return the workspace of the configuration, or None if it does not support, or is not proven for, this problem."""
    try:
        for part in set(configuration.micro_configs):
            found = algorithm_named(part.algorithm, device_type)
            unproven = is_foreign(found, problem)
            if unproven or found.supports_micro_batch(problem, part.micro_batch_size) is not None:
                return None
        return Executable.of(problem, configuration, device_type=device_type).workspace_bytes
    except (InvalidInputError, LibraryError, UnavailableError):
        return None


def _pixels_apart(one: ConvProblem, other: ConvProblem) -> float:
    return abs(log(one.h * one.w / (other.h * other.w)))


def _distance(one: int, other: int) -> float:
    return abs(log(one / other))
