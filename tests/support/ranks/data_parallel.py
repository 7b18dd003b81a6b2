"""What the ranks of a group do in tests of the benchmark of data-parallel training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.clock.machine import TickingClock
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mucudnn.bench.results.variants import Communication
from mucudnn.bench.results.writing import Row
from mucudnn.bench.sources.trainee import mean_square
from mucudnn.bench.suites import data_parallel
from mucudnn.bench.suites.data_parallel import Setting, Wire, are_equal, digest
from mucudnn.core.config import Config
from mucudnn.core.problem import MemoryFormat
from mucudnn.distributed import gathered

SETTING = Setting("tiny", 2, 2, "cpu", "float32", MemoryFormat.CONTIGUOUS, Communication.ALLREDUCE, 2)
SMALL_CAP = 1e-6  # a byte
ROUNDS = 2
PARTING = "parting"  # steps of ranks that do not stay equal


def parting(model: nn.Module) -> bool:
    """Change a parameter of rank 1 a little, and compare."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-6
    return are_equal(model)


class Slow(nn.Module):
    """Lets time pass, more of it on rank 1."""

    def __init__(self, clock: TickingClock) -> None:
        super().__init__()
        self.clock = clock

    def __deepcopy__(self, memo: object) -> Slow:
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.clock.seconds += 100 * (1 + dist.get_rank())
        return x


def net(clock: TickingClock) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Slow(clock)),
        *(nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)),
    )


def measured(rank: int, database: Path) -> dict[str, list[Row]]:
    """Steps of a small net by each communication, with known times: a message takes ten seconds where fp16 is sent."""
    clock = TickingClock()
    send = data_parallel.fp16_compress_hook

    def fp16_compress_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch would look at annotations
        clock.seconds += 10
        return send(state, bucket)

    with patch.object(data_parallel, "fp16_compress_hook", fp16_compress_hook):
        found = {
            communication.value: steps(communication, clock, database)
            for communication in Communication
            if communication is not Communication.BF16
        }
    with patch.object(data_parallel, "are_equal", parting):
        return {**found, PARTING: steps(Communication.ALLREDUCE, clock, database)}


def steps(communication: Communication, clock: TickingClock, database: Path) -> list[Row]:
    torch.manual_seed(0)
    return data_parallel.measure_data_parallel(
        replace(
            SETTING,
            communication=communication,
            bucket_caps=(None, SMALL_CAP) if communication is Communication.FP16 else (None,),
        ),
        net(clock),
        (3, 8, 8),
        mean_square,
        Config(algorithms=("gemm",), time_limit="10ms", operations=("forward",), database=database, confirm=False),
        rounds=ROUNDS,
        clock=clock,
    )


# Ranks that train together by each communication.


PERIOD = 4
STEPS = 2 * PERIOD + 1


def digests(rank: int, communication: Communication) -> list[list[str]]:
    """Train on data of this rank; return the digests of all ranks after each step."""
    torch.manual_seed(rank)  # parameters too: torch sends those of rank 0 to all
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)))
    x = torch.randn(8, 16)
    optimizer = Wire(communication, PERIOD).connect(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        found.append(gathered(digest(model)))
    return found
