"""The benchmark of memory budgets: every way is counted and timed, and what does not fit shows the least."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.in_threads import in_threads
from torch import Tensor, nn
from torch.nn import functional as F

import mucudnn
from mucudnn.bench.results.reading import read_folder
from mucudnn.bench.results.variants import Saving, budget_bytes
from mucudnn.bench.suites import budgets
from mucudnn.bench.suites.budgets import (
    BudgetOptions,
    Setting,
    Steps,
    benchmark_budgets,
    budget_tables,
)
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError, InvalidInputError, UnavailableError
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.team import ALONE
from mucudnn.core.terminal import Progress
from mucudnn.optimizing.curve import largest_within
from mucudnn.optimizing.keeping import keep_within
from mucudnn.optimizing.steps import Step

NET = """
from torch import nn

def net():
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""
SHAPE = (3, 24, 24)


def untuned(model: nn.Module, x: Tensor, config: Config, *, progress: Progress, step: Step) -> nn.Module:
    keep_within(model, x, config, step, ALONE, progress)
    return model


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(mucudnn, "optimize", untuned)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # Each count of a step does, of all that pytest has loaded.
    file = tmp_path / f"net_of_{tmp_path.name}.py"
    file.write_text(NET)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with in_threads(budgets):
        yield f"{file}:net"


def test_every_way_is_within_its_budget_or_at_its_least(source: str, tmp_path: Path) -> None:
    options, out = BudgetOptions(rounds=2), tmp_path / "out"
    benchmark_budgets([source], [4], ["9/10", "1/99"], options, out, input_size=SHAPE)
    lines = read_folder(out).lines
    ways = [Saving.TORCH, Saving.MUCUDNN, Saving.TORCH_CHECKPOINT, Saving.TORCH_ACCUMULATE]
    assert [(c["budget"], c["contestant"]) for c in lines] == [(b, way) for b in ("9/10", "1/99") for way in ways]
    step_bytes = lines[0]["peak_bytes"]
    for line in lines:
        assert (line["failure"], len(line["samples_s"]), line["images"]) == (None, 2, 4)
        if line["contestant"] == Saving.TORCH:
            assert (line["peak_bytes"], line["budget_bytes"]) == (step_bytes, None)
        else:
            assert line["budget_bytes"] == budget_bytes(line["budget"], step_bytes)
            assert (line["peak_bytes"] <= line["budget_bytes"]) is (line["budget"] == "9/10")
    for within, least in zip(lines[1:4], lines[5:], strict=True):
        assert within["peak_bytes"] > least["peak_bytes"]  # It needs no less than it may.
    within, least = lines[1], lines[5]
    assert within["least_bytes"] is None
    assert least["peak_bytes"] <= least["least_bytes"] < step_bytes
    assert min(least["predicted_bytes"], least["predicted_s"], least["planning_s"]) > 0
    (table,) = budget_tables(read_folder(out))
    assert not isinstance(table, str)
    assert ["at the least" in cells[2] for cells in table.rows] == [False] * 5 + [True] * 3


def test_the_largest_batch_of_each_way_is_timed(source: str, tmp_path: Path) -> None:
    options, out = BudgetOptions(rounds=2), tmp_path / "out"
    benchmark_budgets([source], [None], ["700KiB"], options, out, input_size=SHAPE)
    torchs, *others = read_folder(out).lines
    assert [line["contestant"] for line in others] == [Saving.MUCUDNN, Saving.TORCH_CHECKPOINT]
    for line in (torchs, *others):
        assert (line["failure"], line["batch_size"], line["budget_bytes"]) == (None, None, 700 * 2**10)
        assert 0 < torchs["images"] <= line["images"]
        assert line["peak_bytes"] <= line["budget_bytes"]
    with pytest.raises(InvalidInputError, match="for the largest batch give a size"):
        benchmark_budgets([source], [None], ["1/3"], options, out, input_size=SHAPE)


def test_the_largest_batch_is_found_in_few_tries() -> None:
    needs: list[Callable[[int], int]] = [
        lambda n: 1000 + 70 * n,
        lambda n: 100 * n,
        lambda n: 50 + 70 * n + 3 * n * n,
        lambda n: max(800, 100 * n),
    ]
    for needed_bytes in needs:
        tried: list[int] = []
        found = largest_within(lambda n, needed=needed_bytes, tried=tried: tried.append(n) or needed(n), 10_000)
        assert needed_bytes(found) <= 10_000 < needed_bytes(found + 1)
        assert len(tried) <= 10
        assert max(tried) <= 2 * found
    with pytest.raises(InfeasibleError, match="a step of one sample needs at least 170B"):
        largest_within(lambda n: 100 + 70 * n, 99)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.mean((2, 3))


def steps_of(model: nn.Module, saving: Saving) -> Steps:
    setting = Setting("tiny", 4, "1/2", MemoryFormat.CHANNELS_LAST)
    return Steps((model, (3, 8, 8), F.cross_entropy), saving, setting, Config(), 0, 0.5)


def test_checkpoints_and_parts_of_the_batch_train_as_the_whole_step() -> None:
    torch.manual_seed(0)
    sequence = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(10, 10, 3)))
    sequence.extend((nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    for model, named in (
        (sequence, ["2 segments", "3 segments", "4 segments", "5 segments"]),
        (Skipping(), ["3 blocks"]),
    ):
        for saving, names in (
            (Saving.TORCH, [""]),
            (Saving.TORCH_CHECKPOINT, named),
            (Saving.TORCH_ACCUMULATE, ["2 parts", "4 parts"]),
        ):
            steps = steps_of(model, saving)
            trainee, images, labels = steps._trainee(4)
            state, found = copy.deepcopy(trainee.model.state_dict()), []
            for name, step in steps._candidates(trainee, images.contiguous(), labels % 3):
                found.append(name)
                trainee.model.load_state_dict(state)
                trainee.optimizer.state.clear()
                step()
                trained = [parameter.detach().clone() for parameter in trainee.model.parameters()]
                if saving is Saving.TORCH:
                    expected = trained
                torch.testing.assert_close(trained, expected)
            assert found == names
    with pytest.raises(UnavailableError, match="a batch of one image cannot be divided"):
        steps_of(sequence, Saving.TORCH_ACCUMULATE).of(1)


def test_a_run_out_of_time_is_resumed_and_nothing_is_compared_with_what_fails(source: str, tmp_path: Path) -> None:
    out, lines = tmp_path / "out", list[dict[str, Any]]()
    told = [f"{source}, batch 4, within 1/2: the 0 s were over before all was ready"]
    for seconds, expected in ((0.0, told), (None, [])):
        assert not lines
        benchmark_budgets([source], [4], ["1/2"], BudgetOptions(seconds=seconds), out, input_size=(5, 16, 16))
        lines += read_folder(out).lines
        assert [text for text in budget_tables(read_folder(out)) if isinstance(text, str)] == expected
    (line,) = lines
    assert line["contestant"] == Saving.TORCH
    assert "to have 3 channels, but got 5" in line["failure"]
