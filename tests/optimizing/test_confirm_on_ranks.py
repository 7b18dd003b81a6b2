"""Steps that ranks run together: real processes over gloo, on a machine where one rank's convolutions are slow."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.confirmed_net import ASKED, REST_S, Machine, Net, X, confirmed, made_up_machine, torchs, tuned_net
from support.ranks.group import Ranks, error_of, run_once
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.team import Team
from mucudnn.tuning.tuner import team_of

RANKS = 2
SLOW_S = 0.009  # of a call of ours, that takes torch's own 2 ms and ours elsewhere 1


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUCUDNN_DATABASE", str(folder / "measurements.sqlite"))
        yield made_up_machine(patch)


def outcome(net: Net, config: Config = ASKED, **given: Any) -> dict[str, Any]:
    """Confirm, and tell what was found and what the net runs then."""
    passes: list[object] = []
    net.register_forward_hook(lambda *of: passes.append(of[0]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = confirmed(net, config, **given)
    own = sorted(f"{name} {operation}" for name, operation in torchs(net))
    texts = [str(one.message) for one in told if one.category is RuntimeWarning]
    return {"found": repr(found), "torchs": own, "passes": len(passes), "told": texts}


def team() -> Team:
    return team_of()


def slow_on_one_rank(rank: int, folder: Path, slow: int) -> dict[str, Any]:
    with machine(folder) as made_up:
        if rank == slow:
            made_up.ours_s[3] = SLOW_S
        return outcome(tuned_net(), team=team())


def slow_step_on_one_rank(rank: int, folder: Path, slow: int) -> dict[str, Any]:
    """All but the convolutions is slower with ours on this rank."""
    with machine(folder) as made_up:
        if rank == slow:
            made_up.rest_s[True] = 3 * REST_S
        return outcome(tuned_net(), team=team())


def with_data_parallel(rank: int, folder: Path) -> dict[str, Any]:
    """A user's step waits for the gradients of all ranks."""
    with machine(folder) as made_up:
        made_up.ours_s[3] = SLOW_S
        net = tuned_net()
        parallel = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        before = [p.detach().clone() for p in net.parameters()]

        def step(model: nn.Module) -> None:
            optimizer.zero_grad()
            parallel(X + rank).square().sum().backward()
            optimizer.step()

        found = outcome(net, Config(), step=step, team=team())
        is_restored = all(torch.equal(p, value) for p, value in zip(net.parameters(), before, strict=True))
        return {**found, "is_restored": is_restored}


def failing(rank: int, folder: Path, at: int) -> dict[str, Any]:
    """A step that fails on the last rank, at a step of this number."""
    with machine(folder) as made_up:
        made_up.ours_s[3] = SLOW_S
        numbers = count()

        def step(model: nn.Module) -> None:
            if next(numbers) == at and rank == RANKS - 1:
                raise RuntimeError("no memory\nand a stack")
            model(X).sum().backward()

        return outcome(tuned_net(), step=step, team=team())


def step_on_one_rank(rank: int, folder: Path) -> dict[str, Any]:
    def step(model: nn.Module) -> None:
        model(X).sum().backward()

    with machine(folder):
        return {"error": error_of(lambda: confirmed(tuned_net(), step=step if rank == 0 else None, team=team()))}


def optimized(rank: int, folder: Path) -> dict[str, Any]:
    """A real model on the real machine, as in a script."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
    x = torch.randn(4, 8, 16, 16)
    config = Config(database=folder / "all.sqlite", algorithms=("gemm", "direct", "winograd-2x2"), confirm=True)
    mucudnn.optimize(net, x, config)
    report = mucudnn.report(net)
    shown = [f"{name} {one.problem} {one.configuration} {one.in_place}" for name, one in report.layers]
    found = [replace(one, load=None) for one in report.confirmations]
    return {"layers": shown, "found": repr(found), "error": error_of(lambda: net(x).sum().backward())}


def confirm_and_die(rank: int, folder: Path, victim: int) -> dict[str, Any]:
    """The victim kills itself within a step."""
    numbers, net = count(), tuned_net()  # the seventh is in the middle of the rounds

    def step(model: nn.Module) -> None:
        if next(numbers) == 7 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        model(X).sum().backward()

    with machine(folder):
        return {"error": error_of(lambda: confirmed(net, step=step, team=team())), "torchs": len(torchs(net))}


pytestmark = pytest.mark.slow

OF_FIRST = ["first backward_filter", "first forward"]
NOT_CONFIRMED = "the tuned choices could not be confirmed in the model's own step: "

Found = Sequence[dict[str, Any]]  # by rank
Run = Callable[..., Found]


@pytest.fixture(scope="module")
def run(ranks: Mapping[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_once(ranks[RANKS], tmp_path_factory.mktemp("scenarios"))


def same(found: Found) -> dict[str, Any]:
    """What is the same on all ranks."""
    first, *others = found
    assert all(other == first for other in others), found
    return first


@pytest.mark.parametrize(("slow", "put_back"), [(0, OF_FIRST), (1, [])])
def test_what_is_slow_on_rank_0_is_put_back_on_all(run: Run, slow: int, put_back: list[str]) -> None:
    found = same(run(slow_on_one_rank, slow))
    assert found["torchs"] == put_back
    assert "is_withdrawn=False" in found["found"]


@pytest.mark.parametrize(("slow", "put_back"), [(0, 5), (1, 0)])
def test_a_step_that_is_slower_on_rank_0_has_torchs_own_on_all(run: Run, slow: int, put_back: int) -> None:
    found = same(run(slow_step_on_one_rank, slow))
    assert len(found["torchs"]) == put_back
    assert f"is_withdrawn={put_back > 0}" in found["found"]


def test_a_users_step_may_wait_for_other_ranks(run: Run) -> None:
    found = same(run(with_data_parallel))
    assert found["torchs"] == OF_FIRST
    assert found["is_restored"]
    assert not found["told"]


@pytest.mark.parametrize("number", [0, 20])
def test_where_one_ranks_step_fails_all_warn_and_keep_what_was_tuned(run: Run, number: int) -> None:
    """The later one fails after torch's own was put back."""
    other, failed = run(failing, number)
    assert other["told"] == [f"{NOT_CONFIRMED}rank 1: RuntimeError: no memory"]
    assert failed["told"] == [f"{NOT_CONFIRMED}RuntimeError: no memory"]
    assert other["found"] == failed["found"] == "None"
    assert other["torchs"] == failed["torchs"] == []
    assert (other["passes"], failed["passes"]) == (number + 1, number)


def test_a_step_of_one_rank_only_is_refused_on_all(run: Run) -> None:
    error = same(run(step_on_one_rank))["error"]
    assert error == "SharingError: step is given on rank 0, None on rank 1; give it on all ranks, or on none"


def test_a_real_model_runs_alike_on_all_ranks(run: Run) -> None:
    found = same(run(optimized))
    assert len(found["layers"]) == 5
    assert found["error"] == "none"


def test_a_rank_that_is_killed_in_a_step_is_named_and_what_was_tuned_runs_on(tmp_path: Path) -> None:
    first, _, last = Ranks(3).run(confirm_and_die, tmp_path, 1, killed=[1])
    for one in (first, last):
        assert one["error"].startswith("SharingError: rank 1 ended")
        assert one["torchs"] == 0
