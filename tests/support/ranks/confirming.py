"""What every rank of a group of two does in tests of confirming together.

On a made-up machine a convolution takes known seconds, other ones on the last rank. What is found has all that a rank
decides, and how many forward passes it ran.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from support.confirmed_net import ASKED, REST_S, Machine, Net, X, confirmed, made_up_machine, torchs, tuned_net
from support.ranks.group import error_of
from support.ranks.scenarios import Found
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mucudnn
from mucudnn.core.config import Config
from mucudnn.distributed import Team, team_of

RANKS = 2
SLOW_S = 0.009  # of a call of ours, that takes torch's own 2 ms and ours elsewhere 1


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUCUDNN_DATABASE", str(folder / "measurements.sqlite"))
        yield made_up_machine(patch)


def outcome(net: Net, config: Config = ASKED, **given: Any) -> Found:
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
    found = team_of(Config())
    assert found is not None
    return found


def slow_on_one_rank(rank: int, folder: Path, slow: int) -> Found:
    with machine(folder) as made_up:
        if rank == slow:
            made_up.ours_s[3] = SLOW_S
        return outcome(tuned_net(), team=team())


def slow_step_on_one_rank(rank: int, folder: Path, slow: int) -> Found:
    """All but the convolutions is slower with ours on this rank."""
    with machine(folder) as made_up:
        if rank == slow:
            made_up.rest_s[True] = 3 * REST_S
        return outcome(tuned_net(), team=team())


def with_data_parallel(rank: int, folder: Path) -> Found:
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


def failing(rank: int, folder: Path, at: int) -> Found:
    """A step that fails on the last rank, at a step of this number."""
    with machine(folder) as made_up:
        made_up.ours_s[3] = SLOW_S
        numbers = count()

        def step(model: nn.Module) -> None:
            if next(numbers) == at and rank == RANKS - 1:
                raise RuntimeError("no memory\nand a stack")
            model(X).sum().backward()

        return outcome(tuned_net(), step=step, team=team())


def step_on_one_rank(rank: int, folder: Path) -> Found:
    def step(model: nn.Module) -> None:
        model(X).sum().backward()

    with machine(folder):
        return {"error": error_of(lambda: confirmed(tuned_net(), step=step if rank == 0 else None, team=team()))}


def optimized(rank: int, folder: Path) -> Found:
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
