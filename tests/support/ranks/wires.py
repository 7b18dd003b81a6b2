"""Ranks that train together by each communication: a script. Arguments: a folder, and the number of ranks.

For each step it writes the digests of all ranks' parameters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from support.ranks.forked import fork_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mucudnn.bench.suites.data_parallel.benchmark import digest, gathered
from mucudnn.bench.suites.data_parallel.wire import Wire
from mucudnn.words.communication import Communication

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


def main(folder: Path, size: int, communications: Sequence[Communication]) -> None:
    def work(rank: int) -> None:
        found = {communication: digests(rank, communication) for communication in communications}
        if rank == 0:
            (folder / "digests.json").write_text(json.dumps(found))

    fork_ranks(folder, size, work)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), [one for one in Communication if one.averages_parameters])
