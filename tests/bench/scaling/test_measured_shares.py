"""A batch shared out to ranks of unlike speed, predicted and measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.clock.machine import ENVIRONMENT
from support.ranks.alone import group_of_one
from support.snapshots import assert_as_stored

from mucudnn.bench.scaling.measured_shares import (
    MeasuredShares,
    Place,
    measure_shares,
    measured_in_words,
    measured_share_rows,
    measured_shares_table,
)
from mucudnn.solver.shares import Shares
from mucudnn.words.config import Config
from mucudnn.words.errors import UnavailableError

MODEL = "import torch\n\ndef make():\n    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())\n"


def test_a_rank_measures_beside_its_load_and_gives_the_cores_back(tmp_path: Path) -> None:
    source = tmp_path / "sharing_model.py"
    source.write_text(MODEL)
    config = Config(time_limit="10ms", database=tmp_path / "m.sqlite")
    before = os.sched_getaffinity(0), torch.get_num_threads()
    with group_of_one():
        found = measure_shares(
            f"{source}:make", {"input_shape": (3, 8, 8)}, [Place(1, load=1)], batch=6, config=config, rounds=3
        )
        with pytest.raises(UnavailableError, match="999 threads"):
            measure_shares("alexnet", {}, [Place(999)], batch=6, config=config, rounds=3)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before
    assert found.best.samples == found.equal.samples == (6,)
    assert found.alone_s == found.best.times_s
    (row,) = measured_share_rows(found)
    assert 0 < row["time_s"] < 10
    assert len(found.best_s) == len(found.equal_s) == 3


def test_it_is_told_as_stored() -> None:
    """In the second round the other rank was the slowest."""
    found = MeasuredShares(
        *("resnet18", 16, (Place(2), Place(1, load=1)), Config(), ENVIRONMENT),
        best=Shares((12, 4), (0.12, 0.12)),
        equal=Shares((8, 8), (0.08, 0.24)),
        best_s=((0.13, 0.12), (0.12, 0.125), (0.14, 0.11)),
        equal_s=((0.08, 0.26), (0.08, 0.25), (0.08, 0.28)),
        alone_s=(0.16, 0.48),
    )
    assert found.speedup_over_equal == pytest.approx(2.0)
    assert found.over_predicted == pytest.approx(0.13 / 0.12)
    assert_as_stored("share-measured", measured_shares_table(found), measured_in_words(found))
