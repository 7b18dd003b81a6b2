"""Trains torch's model, a tuned one and one under ``enable`` in every way, each on all ranks: a script for torchrun.

Arguments: a folder, ``cpu`` or ``cuda``, and the names of ways. Each rank writes what it found into a file of its own.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.problems.tuned_by_hand import ran
from support.ranks.errors import error_of
from support.ranks.launching import end
from support.ranks.ways_of_training import EAGER, ONLY_ON_A_GPU, WAYS, Net, Way, batch, trained
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mucudnn
from mucudnn.enabling import switch
from mucudnn.modules.tuned_module import TunedModule
from mucudnn.tuning import choose as choosing
from mucudnn.words.config import Config

Found = Mapping[str, Any]


class Trainer:
    """Trains in the ways of torch. measured: how many problems this rank has measured so far."""

    def __init__(self, folder: Path, device: str) -> None:
        self.config = Config(database=folder / "all.sqlite", algorithms="gemm", confirm=False)
        self.device, self.measured = device, 0

    def net(self, dtype: torch.dtype = torch.float64) -> Net:
        torch.manual_seed(0)
        return Net().to(self.device, dtype)

    def tuned(self, dtype: torch.dtype = torch.float64) -> Net:
        """All of its convolutions run something of ours, and none has run so far."""
        ours = self.net(dtype)
        x, _ = batch(0, ours.first.weight)
        mucudnn.optimize(ours, x, self.config, progress=self._count)
        assert [str(one) for _, one in mucudnn.report(ours).layers if one.configuration.is_baseline] == []
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

    def sync_batch_norm(self) -> Found:
        """What becomes of it in evaluation, and in training, where torch may refuse it."""
        theirs, ours = (nn.SyncBatchNorm.convert_sync_batchnorm(net) for net in (self.net(), self.tuned()))
        x, _ = batch(0, ours.first.weight)
        with torch.no_grad():
            evaluated = difference([ours.eval()(x)], [theirs.eval()(x)])
        return {
            "kind": type(ours.norm).__name__,
            "evaluated": evaluated,
            "ran": sorted(ran(ours)),
            "errors": [error_of(lambda net=net: net.train()(x)) for net in (theirs, ours)],
        }

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


def found_by(call: Callable[[], Found]) -> Found:
    try:
        return call()
    except Exception:
        return {"error": traceback.format_exc()}


def main(folder: Path, device: str, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    choosing.is_gain = lambda run: True  # type: ignore[attr-defined]  # ours runs, whether it is faster or not
    gpus = torch.cuda.device_count()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    has_gpu_of_its_own = device == "cuda" and gpus >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if has_gpu_of_its_own else "gloo")
    trainer = Trainer(folder, device)
    found = {"shared": found_by(trainer.shared)}
    ways = {**WAYS, **ONLY_ON_A_GPU}
    calls = {name: lambda way=way, name=name: trainer.compare(way, EAGER.get(name, way)) for name, way in ways.items()}
    calls |= {"autocast": trainer.autocast, "sync_batch_norm_of_torch": trainer.sync_batch_norm}
    for name in names:
        found[name] = found_by(calls[name])
        dist.barrier()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
