"""Trains torch's model, a tuned one and one under ``enable`` in every way, each on all ranks; what must hold then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.always_ours import choose_always_ours
from support.problems.tuned_by_hand import ran
from support.ranks.ways_of_training import EAGER, ONLY_ON_A_GPU, WAYS, Net, Way, batch, trained
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mucudnn
from mucudnn.core.config import Config
from mucudnn.core.problem import Operation
from mucudnn.enabling import switch
from mucudnn.running.modules import TunedModule

Found = Mapping[str, Any]


class Trainer:
    """Trains in the ways of torch. measured: how many problems this rank has measured so far."""

    def __init__(self, folder: Path, device: str) -> None:
        self.config = Config(database=folder / "all.sqlite", algorithms="gemm", confirm=False, thorough=True)
        self.device, self.measured = device, 0

    def net(self, dtype: torch.dtype = torch.float64) -> Net:
        torch.manual_seed(0)
        return Net().to(self.device, dtype)

    def tuned(self, dtype: torch.dtype = torch.float64) -> Net:
        """All of its convolutions run something of ours, and none has run so far."""
        ours = self.net(dtype)
        x, _ = batch(0, ours.first.weight)
        mucudnn.optimize(ours, x, self.config, progress=self._count)
        torchs = [str(one) for _, one in mucudnn.report(ours).layers if one.configuration.is_baseline]
        assert not torchs, "\n".join(torchs)
        for module in ours.modules():
            if isinstance(module, TunedModule) and module.choices is not None:
                module.choices.executables.clear()
        return ours

    def compare(self, way: Way, torchs_way: Way) -> Found:
        expected, _ = final(torchs_way(self.net()))
        return {"optimize": self._optimized(way, expected), "enable": self._enabled(way, expected)}

    def shared(self) -> Found:
        """What is chosen for a database that is empty, and how much of it this rank measures."""
        chosen = mucudnn.report(self.tuned()).layers
        return {"choices": [f"{name}: {one.problem} {one.configuration}" for name, one in chosen]} | {
            "measured": self.measured
        }

    def autocast(self) -> Found:
        """How far torch's and ours are from float64, both in bfloat16 where autocast says so."""

        def forward(wrapped: nn.Module, x: Tensor, step: int) -> Tensor:
            with torch.autocast(self.device, torch.bfloat16):
                y: Tensor = wrapped(x)
            return y.to(x.dtype)

        exact, _ = final(trained(DistributedDataParallel(self.net())))
        theirs, _ = final(trained(DistributedDataParallel(self.net(torch.float32)), forward=forward))
        with torch.autocast(self.device, torch.bfloat16):
            ours = self.tuned(torch.float32)
        mine, equal = final(trained(DistributedDataParallel(ours), forward=forward))
        errors = {"ours": difference(mine, exact), "torchs": difference(theirs, exact)}
        return errors | {"ran": sorted(ran(ours)), "equal": equal}

    def _optimized(self, way: Way, expected: Sequence[Tensor]) -> Found:
        ours = self.tuned()
        parameters, equal = final(way(ours))
        return {"difference": difference(parameters, expected), "equal": equal, "ran": sorted(ran(ours))}

    def _enabled(self, way: Way, expected: Sequence[Tensor]) -> Found:
        """A new session, so that what is counted is this way's."""
        switch._sessions.clear()
        with mucudnn.tuned(self.config):
            parameters, equal = final(way(self.net()))
        computed = {one.problem.operation for one in mucudnn.status().problems if one.ours}
        return {"difference": difference(parameters, expected), "equal": equal, "ran": sorted(computed)}

    def _count(self, text: str, fraction: float) -> None:
        self.measured += "measuring" in text


def final(steps: Iterable[Iterable[Tensor]]) -> tuple[list[Tensor], bool]:
    """The parameters at the end, and whether those of all ranks had the same bits whenever they were shown."""
    last, equal = [], True
    for parameters in steps:
        last = [parameter.detach().clone() for parameter in parameters]
        flat = torch.cat([parameter.flatten() for parameter in last])
        every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(every, flat)
        equal &= all(torch.equal(flat, other) for other in every)
    return last, equal


def difference(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative difference of a parameter."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True))


def train(rank: int, folder: Path, device: str, names: Sequence[str]) -> Mapping[str, Found]:
    """What a rank finds that trains in the ways of these names, and what all of them choose together."""
    trainer, ways = Trainer(folder, device), {**WAYS, **ONLY_ON_A_GPU}
    with pytest.MonkeyPatch.context() as patch:
        choose_always_ours(patch)
        found = {"shared": trainer.shared()}
        for name in names:
            if name in ways:
                found[name] = trainer.compare(ways[name], EAGER.get(name, ways[name]))
            else:
                found[name] = getattr(trainer, name)()
            dist.barrier()
    return found


# What must hold for what all ranks found


def assert_torchs(found: Sequence[Mapping[str, Any]], way: str, how: str) -> None:
    """Ours have run, and trained as torch's. how: ``optimize`` or ``enable``."""
    for one in found:
        assert one[way][how]["ran"] == sorted(Operation), "torch's own ran in place of ours"
        assert one[way][how]["equal"], "the ranks' parameters have parted"
        assert one[way][how]["difference"] < 1e-12


def assert_as_near_to_float64_as_torch(found: Sequence[Mapping[str, Any]]) -> None:
    for one in found:
        assert one["autocast"]["ran"] == sorted(Operation)
        assert one["autocast"]["equal"]
        assert 0 < one["autocast"]["ours"] < 1.5 * one["autocast"]["torchs"]


def assert_tuned_together(found: Sequence[Mapping[str, Any]]) -> None:
    """Each rank measured problems of its own, and all choose alike."""
    choices, *others = (one["shared"]["choices"] for one in found)
    assert others == [choices] * len(others)
    measured = [one["shared"]["measured"] for one in found]
    assert sum(measured) == len(choices)
    assert min(measured) > 0
