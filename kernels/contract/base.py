"""Answers that simple algorithms have in common."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mucudnn.kernels.contract.algorithm import Algorithm, Workspace
from mucudnn.kernels.contract.allocation import counted_internal_bytes
from mucudnn.words.problem import ConvProblem


class BaseAlgorithm:
    """Base of algorithms: it answers all of ``Algorithm`` but ``name``, ``version``, ``supports`` and ``step``.

    The answers are those of an algorithm on the CPU that promises nothing, shares nothing between micro-batches, takes
    slices of any size, and is handed no workspace. Bytes that torch allocates inside are counted by running it once.
    """

    __slots__ = ()

    @property
    def device_type(self) -> str:
        """Type of the devices on which it runs: ``cpu`` or ``cuda``."""
        return "cpu"

    @property
    def deterministic(self) -> bool:
        return False

    @property
    def source(self) -> str | None:
        return None

    def is_foreign(self, problem: ConvProblem) -> bool:
        return False

    @property
    def is_torchs_own(self) -> bool:
        return False

    @property
    def is_search(self) -> bool:
        return False

    @property
    def is_last_resort(self) -> bool:
        return False

    @property
    def alignment_bytes(self) -> int:
        return 1

    def is_local(self, problem: ConvProblem) -> bool:
        return False

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        return None

    def can_run_undivided(self, problem: ConvProblem) -> bool:
        return self.is_torchs_own

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        return Workspace()

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        algorithm: Algorithm = self  # type: ignore[assignment]
        return counted_internal_bytes(algorithm, problem, micro_batch_size, self.device_type)

    def why_not_here(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        return None

    def alternatives(self, problem: ConvProblem, micro_batch_size: int) -> Iterable[Algorithm]:
        return ()

    def build(self, problem: ConvProblem, micro_batch_size: int) -> None:
        pass

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        pass

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        pass
