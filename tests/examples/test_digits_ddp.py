"""The example of data-parallel training, for an epoch: what it writes, and its exit status where something is wrong.

As a script it is the example with two faults: gradients are not averaged, and each model has a seed of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.places import EXAMPLES
from support.ranks.launching import torchrun

pytestmark = pytest.mark.slow

pytest.importorskip("sklearn")
EXAMPLE = EXAMPLES / "digits_ddp.py"
LIMIT_S = 300  # several processes load all of torch, on cores that they share with other tests
STEPS = 14  # of an epoch: 899 digits, in batches of 64
ONE_EPOCH = ("--epochs", 1, "--policies", "undivided", "--at-least", 5, "--within", 95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A place for results, with one database for all runs."""
    place = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUCUDNN_DATABASE", str(place / "all.sqlite"))
        yield place


@pytest.fixture(scope="module")
def agreeing(folder: Path) -> dict[str, Any]:
    """Results of two ranks."""
    done = torchrun(EXAMPLE, *ONE_EPOCH, "--out", folder / "two", ranks=2, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "mucudnn and torch agree" in done.stdout
    return results(folder / "two")


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "digits.json").read_text())
    return found


def test_two_ranks_train_alike_with_torch_and_with_mucudnn(agreeing: dict[str, Any]) -> None:
    assert agreeing["ranks"] == 2
    assert agreeing["disagreements"] == []
    torchs, ours = agreeing["runs"]
    assert [torchs["name"], ours["name"]] == ["torch", "mucudnn, undivided"]
    assert len(ours["chosen"]) == 11  # three operations of four layers, but the gradient of the images
    for one in (torchs, ours):
        assert len(one["losses"]) == STEPS
        assert one["losses"][-1] < one["losses"][0]
        assert one["first_unequal_step"] is None
        assert one["seconds_to_accuracy"] == one["seconds"][0]
    assert ours["losses"] == pytest.approx(torchs["losses"], rel=1e-2)


def test_losses_and_accuracies_are_drawn(agreeing: dict[str, Any], folder: Path) -> None:
    assert (folder / "two" / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_whatever_disagrees_is_named_and_is_the_exit_status(
    agreeing: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUCUDNN_DATABASE", str(folder / "all.sqlite"))
    impossible = (*ONE_EPOCH, "--at-least", 101, "--within", -1)
    done = torchrun(__file__, *impossible, "--out", folder / "wrong", ranks=2, limit_s=LIMIT_S)
    assert done.returncode == 1
    of_ours = "\n".join(one for one in results(folder / "wrong")["disagreements"] if one.startswith("mucudnn"))
    assert of_ours in done.stdout
    for words in ("ranks' parameters differ after step 1", "first loss is 2.", "%, below 101 %", "points from torch's"):
        assert words in of_ours


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    import digits_ddp  # type: ignore[import-not-found]

    seeds, seed = count(), torch.manual_seed
    digits_ddp.DistributedDataParallel = lambda model: model
    torch.manual_seed = lambda _: seed(next(seeds))
    sys.exit(digits_ddp.main())
