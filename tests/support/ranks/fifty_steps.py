"""Trains for fifty steps with torch's convolutions and with ours, in two precisions: a script for torchrun.

Argument: a folder, into which each rank writes what it found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.eager_layers import COMPILED
from support.problems.tuned_by_hand import tune_by_hand
from support.ranks.launching import end
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mucudnn.modules.conv2d import Conv2d

STEPS, SAMPLES, CLASSES = 50, 4, 5
ALGORITHMS = {"float64": "gemm", "float32": COMPILED}


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    second = (nn.Conv2d(8, 8, 5, padding=2, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 1))
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)).to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What this rank trains with in a step: each class has a pattern, under noise."""
    patterns = torch.randn(CLASSES, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    generator = torch.Generator().manual_seed(STEPS * dist.get_rank() + step)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, 3, 12, 12, generator=generator, dtype=torch.float64)
    return (patterns[labels] + noise).to(dtype), labels


def trained(model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """All parameters at the end, flat, and the steps after which they were not the same bits on all ranks."""
    wrapped, unequal = DistributedDataParallel(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        images, labels = batch(step, dtype)
        optimizer.zero_grad()
        cross_entropy(wrapped(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(every, flat)
        if not all(torch.equal(flat, other) for other in every):
            unequal.append(step)
    return flat, unequal


def compared(name: str) -> Mapping[str, Any]:
    dtype = getattr(torch, name)
    start = nn.utils.parameters_to_vector(network(dtype).parameters()).detach()
    theirs, unequal = trained(network(dtype), dtype)
    model = tune_by_hand(network(dtype), batch(0, dtype)[0], ALGORITHMS[name])
    ours, ours_unequal = trained(model, dtype)
    layers = [module for module in model.modules() if isinstance(module, Conv2d)]
    executables = [executable for layer in layers for executable in layer.choices.executables.values()]  # of what ran
    return {
        "difference": float((ours - theirs).norm() / theirs.norm()),
        "moved": float((theirs - start).norm() / start.norm()),
        "unequal": [*unequal, *ours_unequal],
        "ran": sum(executable is not None for executable in executables),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: compared(name) for name in ALGORITHMS}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
