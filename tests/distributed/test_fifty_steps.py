"""Fifty steps of two ranks with our convolutions: the parameters are those of torch's, and the same on both ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.ranks.launching import script, torchrun

RANKS = 2
OPERATIONS = 8  # three of each of three layers, but the gradient of the model's own input
each_precision = pytest.mark.parametrize("dtype", ["float64", "float32"])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(script("fifty_steps"), folder, ranks=RANKS)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-4)])
def test_parameters_after_fifty_steps_are_torchs(found: list[dict[str, Any]], dtype: str, bound: float) -> None:
    for rank in found:
        assert rank[dtype]["difference"] < bound
        assert rank[dtype]["moved"] > 0.1, "nothing was learnt"


@each_precision
def test_ranks_have_the_same_bits_after_every_step(found: list[dict[str, Any]], dtype: str) -> None:
    assert [rank[dtype]["unequal"] for rank in found] == [[]] * RANKS


@each_precision
def test_all_that_is_compared_with_torch_ran_ours(found: list[dict[str, Any]], dtype: str) -> None:
    assert [rank[dtype]["ran"] for rank in found] == [OPERATIONS] * RANKS
