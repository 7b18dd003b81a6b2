"""Ranks on GPUs: they tune together, train as torch does, and ``cuda:1`` is a device like ``cuda:0``.

With two GPUs ranks have one each, over NCCL. With one, what gloo can do for tensors of a GPU two ranks do on it
together, and the rest one rank over NCCL. The bodies run on the CPU, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import invoke
from support.ranks import training
from support.ranks.group import Ranks
from support.ranks.ways_of_training import ONLY_ON_A_GPU, WAYS

from mucudnn.bench.results.reading import read_folder
from mucudnn.bench.results.variants import Communication

# A warning of a driver or a library is no failure of a convolution.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

TOGETHER_ON_ONE_GPU = ("ddp", "sync_batch_norm")  # all-reduces, broadcasts and all-gathers only
OF_WAYS = [*WAYS, *ONLY_ON_A_GPU]
TRAINED = ("bench", "data-parallel", "support.models_by_name:trained", "--input", "3x9x9")
QUICK = ("--batch", "2", "--rounds", "2", "--time-limit", "200ms")
Found = Sequence[Mapping[str, Any]]  # by rank
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def of_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of two ranks, whether there is a GPU for each of them or not; on the CPU without what torch has on GPUs only."""
    ways = TOGETHER_ON_ONE_GPU if request.param == "cuda" else TOGETHER_ON_ONE_GPU[:1]
    with closing(Ranks(2, request.param)) as ranks:
        return ranks.run(training.train, tmp_path_factory.mktemp("of_two"), request.param, ways)


@pytest.fixture(scope="module")
def over_nccl(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of as many ranks as there are GPUs, up to two, in all ways."""
    with closing(Ranks(min(2, torch.cuda.device_count()), "cuda")) as ranks:
        return ranks.run(training.train, tmp_path_factory.mktemp("over_nccl"), "cuda", [*OF_WAYS, "autocast"])


def test_two_ranks_tune_together(of_two: Found) -> None:
    training.assert_tuned_together(of_two)


@pytest.mark.parametrize("how", ["optimize", "enable"])
def test_two_ranks_train_as_torch(of_two: Found, how: str) -> None:
    ways = [way for way in TOGETHER_ON_ONE_GPU if way in of_two[0]]
    assert ways
    for way in ways:
        training.assert_torchs(of_two, way, how)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["optimize", "enable"])
@pytest.mark.parametrize("way", OF_WAYS)
def test_over_nccl_training_is_torchs(over_nccl: Found, way: str, how: str) -> None:
    training.assert_torchs(over_nccl, way, how)


@pytest.mark.gpu
def test_over_nccl_autocast_is_as_near_to_float64_as_torch(over_nccl: Found) -> None:
    training.assert_as_near_to_float64_as_torch(over_nccl)


@pytest.mark.parametrize(
    ("device", "communication"),
    [
        ("cpu", Communication.ALLREDUCE),
        *(pytest.param("cuda", communication, marks=pytest.mark.gpu) for communication in Communication),
    ],
)
def test_ranks_are_equal_and_steps_are_split(device: str, communication: Communication, tmp_path: Path) -> None:
    ranks, out = min(2, torch.cuda.device_count()) if device == "cuda" else 1, tmp_path / "out"
    how = ("--device", device, "--ranks", ranks, "--communication", communication.value)
    result = invoke(*TRAINED, *QUICK, *how, "--out", out)
    assert result.exit_code == 0, (result.output, result.exception)
    for line in read_folder(out).lines:
        assert (line["ranks"], line["equal"]) == (ranks, line["compared"])
        assert min(line[name] for name in ("forward_convolutions_s", "backward_convolutions_s", "rest_s")) > 0
