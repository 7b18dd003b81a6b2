"""The memory format that torch suggests for a tensor, told without its slow imports."""

from __future__ import annotations

import random

import pytest
import torch
from torch._prims_common import suggest_memory_format

from mucudnn.kernels.contract.buffers import suggests_channels_last

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize("dim", LAST)
def test_it_is_torchs(dim: int) -> None:
    for seed in range(100):
        rng = random.Random(seed)
        shape = [rng.choice([1, 1, 2, 3, 4]) for _ in range(dim)]
        tensor = torch.empty(shape, memory_format=rng.choice([torch.contiguous_format, LAST[dim]]))
        turned = tensor.transpose(rng.randrange(dim), rng.randrange(dim))
        tensor = rng.choice([tensor, turned, tensor[:, :1], tensor[..., ::2], tensor[:, :0]])
        assert suggests_channels_last(tensor) == (suggest_memory_format(tensor) == LAST[dim]), seed


def test_other_tensors_are_not_in_it() -> None:
    assert not suggests_channels_last(torch.zeros(3, 2))
    assert not suggests_channels_last(torch.zeros(3, 2, 4))
