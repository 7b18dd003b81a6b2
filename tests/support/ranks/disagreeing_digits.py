"""The example of training digits, with two faults: gradients are not averaged, and each model has a seed of its own."""

from __future__ import annotations

import sys
from itertools import count

import torch
from support.places import EXAMPLES
from torch import nn

sys.path.insert(0, str(EXAMPLES))
import digits_ddp  # type: ignore[import-not-found]

SEEDS = count()
seed = torch.manual_seed


def without_averaging(model: nn.Module) -> nn.Module:
    return model


if __name__ == "__main__":
    digits_ddp.DistributedDataParallel = without_averaging
    torch.manual_seed = lambda _: seed(next(SEEDS))
    sys.exit(digits_ddp.main())
