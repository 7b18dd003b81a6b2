"""What it gains that an algorithm computes the moments of y, for batch norm in training, as it writes y."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Comparison
from mucudnn.kernels.algorithm import Algorithm, Epilogue, fuses_moments, zero_moments
from mucudnn.kernels.memory import aligned_buffer
from mucudnn.measuring.clocks import Clock, ColdClock
from mucudnn.measuring.operands import random_operands
from mucudnn.measuring.turns import Rounds, compare_in_turns

_ROUNDS = Rounds(5, 40, 0.5)


def compare_moments(
    algorithm: Algorithm,
    problem: ConvProblem,
    batch_size: int,
    sweep: Callable[[Tensor], object],
    clock: Clock | None = None,
    rounds: Rounds = _ROUNDS,
) -> Comparison:
    """Compare a call that computes the moments of y with one that does not and a sweep over y after it, its baseline.

    sweep: computes the moments of y.
    clock: None for one with cold caches.

    Raises ``InvalidInputError`` if the algorithm does not compute moments for this problem.
    """
    if not fuses_moments(algorithm, problem):
        raise InvalidInputError(f"{algorithm.name} does not compute the moments of y for {problem}")
    operands, workspace = random_operands(problem, batch_size), algorithm.workspace(problem, batch_size)
    stage = algorithm.bound(problem, batch_size, [slice(0, batch_size)], workspace)
    assert stage is not None  # as it fuses
    moments, y = zero_moments(problem.k), operands.y
    prepared, scratch = aligned_buffer(workspace.prepared_bytes, "cpu"), aligned_buffer(workspace.scratch_bytes, "cpu")
    addresses = (
        operands.x.data_ptr(),
        operands.w.data_ptr(),
        y.data_ptr(),
        None,
        prepared.data_ptr(),
        scratch.data_ptr(),
    )

    def apart() -> None:
        stage(*addresses)
        sweep(y)

    def together() -> None:
        stage(*addresses, Epilogue(moments=moments.zero_()))

    compared = compare_in_turns(apart, [together], clock or ColdClock(), rounds)[0]
    if isinstance(compared, Exception):
        raise compared
    return compared
