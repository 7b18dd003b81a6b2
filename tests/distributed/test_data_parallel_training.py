"""Training on two ranks in every way that torch offers, of a tuned model and under ``enable``: as torch trains.

Real processes over gloo; ``tests/gpu/test_gpu_ranks.py`` has them on GPUs. Rows of docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from support.ranks import training
from support.ranks.group import Ranks
from support.ranks.ways_of_training import WAYS

pytestmark = pytest.mark.slow

Found = Sequence[Mapping[str, Any]]  # by rank


@pytest.fixture(scope="module")
def trained(ranks: Mapping[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("trained")
    return ranks[2].run(training.train, folder, "cpu", [*WAYS, "autocast"])


@pytest.mark.parametrize("how", ["optimize", "enable"])
@pytest.mark.parametrize("way", WAYS)
def test_training_is_torchs(trained: Found, way: str, how: str) -> None:
    training.assert_torchs(trained, way, how)


def test_under_autocast_it_is_as_near_to_float64_as_torch(trained: Found) -> None:
    training.assert_as_near_to_float64_as_torch(trained)


def test_ranks_tune_together(trained: Found) -> None:
    training.assert_tuned_together(trained)
