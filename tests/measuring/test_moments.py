"""Comparisons of moments as an epilogue with a sweep over y."""

from __future__ import annotations

import pytest
import torch
from support.compiled import algorithm
from torch import Tensor

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.measuring.clocks import WallClock
from mucudnn.measuring.moments import compare_moments
from mucudnn.measuring.turns import Rounds

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")


def test_the_baseline_is_a_call_and_a_sweep_over_what_it_writes() -> None:
    problem = ConvProblem(Operation.FORWARD, c=8, h=6, w=5, k=16, r=1, s=1, memory_format=MemoryFormat.CHANNELS_LAST)
    swept: list[Tensor] = []
    compared = compare_moments(algorithm("pointwise"), problem, 2, swept.append, WallClock(), Rounds(2, 2))
    assert len(compared.time_samples_s) == len(compared.baseline_samples_s) == 2
    assert swept[0].shape == (2, 16, 6, 5)
    assert swept[0].isfinite().all()
    assert torch.equal(swept[0], swept[-1])


def test_an_algorithm_without_moments_is_refused() -> None:
    problem = ConvProblem(Operation.FORWARD, c=8, h=6, w=5, k=16, r=1, s=1)
    with pytest.raises(InvalidInputError, match="loop-nest does not compute the moments"):
        compare_moments(algorithm("loop-nest"), problem, 2, len)
