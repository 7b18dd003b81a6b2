"""For the tests of the solvers: the cost model as a definition, every cover of a batch, small random and hard cases."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mucudnn.core.records import Configuration, Measurement, MicroConfig
from mucudnn.solver.division import Division, solve_wd

US = 1e-6
Key = tuple[int, int, int, tuple[tuple[str, int], ...]]  # time in us, workspace, micro-batches, (name, -size) in order


def measured_us(
    name: str, size: int, step_us: int, scratch: int = 0, *, setup_us: int = 0, prepared: int = 0
) -> Measurement:
    return Measurement(MicroConfig(name, size), setup_us * US, step_us * US, prepared, scratch, relative_error=0.0)


def covers(measurements: Sequence[Measurement], n: int) -> Iterator[tuple[Measurement, ...]]:
    """All multisets whose sizes sum to n."""
    for i, measurement in enumerate(measurements):
        rest = n - measurement.micro_config.micro_batch_size
        if rest == 0:
            yield (measurement,)
        elif rest > 0:
            for cover in covers(measurements[i:], rest):
                yield measurement, *cover


def key_of_cover(cover: Sequence[Measurement]) -> Key:
    """The cost model as DESIGN states it, in whole microseconds; then what ties are broken by."""
    algorithms = {m.micro_config.algorithm: m for m in cover}
    time_us = sum(round(m.step_s / US) for m in cover) + sum(round(m.setup_s / US) for m in algorithms.values())
    workspace = sum(m.prepared_bytes for m in algorithms.values()) + max(m.scratch_bytes for m in cover)
    order = sorted((m.micro_config.algorithm, -m.micro_config.micro_batch_size) for m in cover)
    return time_us, workspace, len(cover), tuple(order)


def key_of(configuration: Configuration) -> Key:
    order = tuple((m.algorithm, -m.micro_batch_size) for m in configuration.micro_configs)
    return round(configuration.time_s / US), configuration.workspace_bytes, len(order), order


def all_keys(measurements: Sequence[Measurement], n: int) -> list[Key]:
    return [key_of_cover(cover) for cover in covers(measurements, n)]


@dataclass(frozen=True)
class Problem:
    """One problem of a random network: what was measured, its batch, and how often it occurs."""

    measurements: list[Measurement]
    batch_size: int
    count: int


def random_problem(source: random.Random, algorithms: int, largest: int) -> Problem:
    """Small whole numbers, so that ties and free algorithms are common; sizes are missing, but a cover is there."""
    while True:
        rows = []
        for name in "abcd"[: source.randint(1, algorithms)]:
            setup_us, prepared = source.choice([0, 0, 1, 2, 5]), source.choice([0, 0, 1, 2, 3])
            for size in source.sample(range(1, largest + 1), source.randint(1, largest)):
                step_us, scratch = source.randint(0, 4 + 4 * size), source.randint(0, 6)
                rows.append(measured_us(name, size, step_us, scratch, setup_us=setup_us, prepared=prepared))
        batch_size = source.randint(1, largest + 2)
        if next(covers(rows, batch_size), None):
            return Problem(source.sample(rows, len(rows)), batch_size, source.choice([1, 1, 2, 3]))


Options = dict[str, list[Configuration]]


def configuration(name: str, time_s: float, workspace_bytes: int, micro_batches: int = 1) -> Configuration:
    return Configuration((MicroConfig(name, 8 // micro_batches),) * micro_batches, time_s, workspace_bytes)


def least_bytes(options: Options) -> int:
    return sum(min(c.workspace_bytes for c in row) for row in options.values())


def correlated(problems: int = 12, seed: int = 7) -> Options:
    """Many sums, close to each other, of which the bounds rule out few."""
    source = random.Random(seed)
    rows = [[source.randint(100, 900) for _ in range(4)] for _ in range(problems)]
    return {
        f"p{i}": [configuration(f"a{b}", (1000 - b + source.random()) * 1e-3, b) for b in row]
        for i, row in enumerate(rows)
    }


def hard_division() -> Division[str]:
    options = correlated()
    return solve_wd(options, least_bytes(options) + 1701)
