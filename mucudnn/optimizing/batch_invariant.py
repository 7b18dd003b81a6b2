"""Choices with which a sample's result has the same bits alone and in any batch."""

from __future__ import annotations

from dataclasses import replace

from mucudnn.core.answers import TunedProblem
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.measuring.same_bits import has_same_bits
from mucudnn.solver.front import desirable_sets


def batch_invariant(of_batch: TunedProblem, of_sample: TunedProblem, device_type: str) -> TunedProblem:
    """Return the choice for a batch by the algorithm that is the fastest for one sample.

    Micro-batches are of one sample, and of those sizes at which the algorithm computes the same bits of each sample.

    of_batch: the choice for the batch, in which results may depend on the batch.
    of_sample: the choice for a batch of one sample.
    """
    n, (chosen,) = of_batch.batch_size, of_sample.configuration.micro_configs
    algorithm = algorithm_named(chosen.algorithm, device_type)
    measured = {
        m.micro_config.micro_batch_size: m
        for m in (*of_batch.allowed_measurements, *of_sample.allowed_measurements)
        if m.micro_config.algorithm == chosen.algorithm
    }
    problem = of_batch.problem
    same = [m for size, m in measured.items() if size == 1 or has_same_bits(algorithm, problem, size, device_type)]
    configuration = desirable_sets(same, n).fastest(n, of_batch.limit_bytes) if same else None
    if configuration is None:  # torch's own, which was not measured, or which the limit does not count
        micro_configs = (MicroConfig(chosen.algorithm, 1),) * n
        configuration = Configuration(micro_configs, n * of_sample.time_s, of_sample.configuration.workspace_bytes)
    return replace(
        of_batch,
        configuration=configuration,
        time_s=configuration.time_s,
        relative_error=of_sample.relative_error,
        reason=f"the same bits in any batch, predicted; for one sample {of_sample.reason}",
        refuted=(),
        unrestricted_s=of_batch.time_s,
    )
