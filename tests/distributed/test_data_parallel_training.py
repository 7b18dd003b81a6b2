"""Training on two ranks in every way that torch offers, of a tuned model and under ``enable``: as torch trains.

Real processes over gloo. The rows about it in docs/compatibility.md.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.ranks.launching import script, torchrun
from support.ranks.ways_of_training import WAYS

from mucudnn.words.problem import Operation

RANKS = 2
CPU_CASES = ("autocast", "sync_batch_norm_of_torch")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found: all ways of training run in the same processes, one after the other."""
    folder = tmp_path_factory.mktemp("trained")
    done = torchrun(script("train_both"), folder, "cpu", *WAYS, *CPU_CASES, ranks=RANKS)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("how", ["optimize", "enable"])
@pytest.mark.parametrize("way", WAYS)
def test_training_is_torchs(trained: list[dict[str, Any]], way: str, how: str) -> None:
    for found in trained:
        assert "error" not in found[way], found[way]["error"]
        assert found[way][how]["ran"] == sorted(Operation), "torch's own ran in place of ours"
        assert found[way][how]["equal"], "the ranks' parameters have parted"
        assert found[way][how]["difference"] < 1e-12


def test_under_autocast_it_is_as_near_to_float64_as_torch(trained: list[dict[str, Any]]) -> None:
    for found in trained:
        autocast = found["autocast"]
        assert "error" not in autocast, autocast["error"]
        assert autocast["ran"] == sorted(Operation)
        assert autocast["equal"]
        assert 0 < autocast["ours"] < 1.5 * autocast["torchs"]


def test_sync_batch_norm_is_put_in_beside_tuned_convolutions(trained: list[dict[str, Any]]) -> None:
    """Torch computes it on the CPU in evaluation only, whatever the convolutions are."""
    for found in trained:
        synced = found["sync_batch_norm_of_torch"]
        assert "error" not in synced, synced["error"]
        assert synced["kind"] == "SyncBatchNorm"
        assert synced["ran"] == [Operation.FORWARD]
        assert synced["evaluated"] < 1e-12
        torchs, ours = synced["errors"]
        assert ours == torchs
        assert "expected input tensor to be on GPU" in ours


def test_ranks_measure_different_problems_and_choose_alike(trained: list[dict[str, Any]]) -> None:
    one, other = (found["shared"] for found in trained)
    assert one["choices"] == other["choices"]
    assert one["measured"] + other["measured"] == len(one["choices"])
    assert min(one["measured"], other["measured"]) > 0
