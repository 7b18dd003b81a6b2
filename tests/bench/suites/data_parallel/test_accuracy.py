"""Time to accuracy, of torch and of mucudnn under each policy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.snapshots import assert_as_stored

from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.suites.data_parallel.accuracy import (
    Learning,
    _with_spread,
    accuracy_tables,
    benchmark_accuracy,
    measure_alone,
)
from mucudnn.running.environment import current_environment
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import InvalidInputError

MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
"""


def test_every_seed_is_learnt_from_the_same_beginning_and_not_again(tmp_path: Path) -> None:
    (tmp_path / "learning_model.py").write_text(MODEL)
    source, policies = f"{tmp_path}/learning_model.py:make", (BatchSizePolicy.ALL,)
    learning = Learning(source, "digits", epochs=2, seeds=(0, 1), until=0.5, policies=policies)
    config = Config(time_limit="20ms", database=tmp_path / "m.sqlite")
    for _ in range(2):
        header = learning.header(config, current_environment())
        benchmark_accuracy(learning, header, tmp_path / "out", partial(measure_alone, learning, config))
        rows = read_folder(tmp_path / "out").lines
        assert [(row["seed"], row["contestant"], row["policy"]) for row in rows] == [
            *((seed, *which) for seed in (0, 1) for which in (("torch", None), ("mucudnn", "all")))
        ]
    for torchs, ours in (rows[:2], rows[2:]):
        assert ours["accuracies"] == pytest.approx(torchs["accuracies"], abs=0.05)
        assert ours["accuracy"] == ours["accuracies"][-1] > 0.5
        assert ours["seconds_to"] in (ours["samples_s"][0], sum(ours["samples_s"]))
        assert (len(ours["samples_s"]), ours["equal"]) == (2, True)
    assert rows[0]["accuracies"] != rows[2]["accuracies"]


def test_a_model_that_cannot_learn_the_images_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="alexnet cannot learn images of 3x8x8 in 10 classes"):
        measure_alone(Learning("alexnet", "digits"), Config())


def _row(seed: int, policy: str | None, accuracy: float, seconds: tuple[float, ...], to_s: float | None) -> Row:
    more = {"accuracy": accuracy, "seconds_to": to_s, "tuning_s": 0.5, "equal": True, "accuracies": [0.1, accuracy]}
    contestant = "torch" if policy is None else "mucudnn"
    return Row(Learning("resnet18", "digits").subject(seed), contestant, seconds, policy, more=more)


def test_the_distance_from_torch_is_told_in_spreads_of_the_seeds() -> None:
    """Torch has 0.80 and 0.90; the means are 0.85 and 0.82, and with equal seeds one image is the spread."""
    rows = [_row(0, None, 0.8, (1,), 1), _row(1, None, 0.9, (1,), 1), _row(0, "all", 0.84, (1,), 1)]
    *torchs, ours = _with_spread([*rows, _row(1, "all", 0.8, (1,), 1)], 0.01)[1:]
    assert ours.more["accuracy_over_spread"] == pytest.approx(0.3)
    assert "accuracy_over_spread" not in torchs[0].more
    *_, ours = _with_spread([_row(0, None, 0.8, (1,), 1), _row(0, "all", 0.82, (1,), 1)], 0.01)
    assert ours.more["accuracy_over_spread"] == pytest.approx(2)


def test_it_is_told_as_stored(tmp_path: Path) -> None:
    learning = Learning("resnet18", "digits", seeds=(0, 1), policies=(BatchSizePolicy.ALL,))
    with open_folder(tmp_path / "out", learning.header(Config(), current_environment())) as folder:
        for seed in (0, 1):
            ours = _row(seed, "all", 0.88, (1.0, 2.0), 3.0 if seed else 1.0)
            folder.add([_row(seed, None, 0.9 - seed / 10, (2.0, 4.0), 6.0 if seed == 0 else None), ours])
    assert_as_stored("bench-accuracy", *accuracy_tables(read_folder(tmp_path / "out")))
