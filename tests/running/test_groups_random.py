"""Random networks of norms, additions and activations train with groups as they do by PyTorch alone.

One seed alone: ``MUCUDNN_FUZZ_SEED=123 pytest tests/running/test_groups_random.py``; 5,000 from the thousandth:
``MUCUDNN_FUZZ_FIRST=1000 MUCUDNN_FUZZ_COUNT=5000``.
"""

from __future__ import annotations

import math

import pytest
from support.effort import seeds
from support.random_training import Comparison, differences, draw

pytestmark = pytest.mark.fuzz

CHUNK = 100
CHUNKS = [range(start, min(start + CHUNK, seeds(60, 500).stop)) for start in seeds(60, 500)[::CHUNK]]


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: f"{chunk.start}-{chunk.stop - 1}")
def test_groups_train_as_pytorch_does(chunk: range) -> None:
    """Each is right; together, their errors are at most twice PyTorch's in the geometric mean."""
    failures, ratios = [], []
    for seed in chunk:
        comparison = Comparison(draw(seed), 1)
        ratios += comparison.ratios()
        if comparison.differences() and (wrong := differences(draw(seed))):
            lines = [f"{name}: {text}" for name, text in [*wrong.items()][:10]]
            failures.append("\n".join((f"seed {seed}: {len(wrong)} differ", *lines, str(draw(seed)))))
    assert not failures, "\n\n".join(failures)
    if len(ratios) > 100:
        assert math.exp(sum(ratios) / len(ratios)) <= 2
