"""Comparison under workspace limits, on a machine whose costs are known: the undivided, ours, and torch's workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, fake_machine, linear
from support.snapshots import printed

from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.suites.convolutions import benchmark as module
from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
from mucudnn.bench.suites.convolutions.choices import Choices
from mucudnn.bench.suites.convolutions.report import limits_tables
from mucudnn.database.database import Database
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.timing.timer import Runner, here
from mucudnn.measuring.whole_runs import Machine
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration

BATCH = 8
CONFIG = Config(operations=(Operation.FORWARD,), thorough=True)


class Bench:
    """Torch at 20 ms a sample with 1000 bytes each that it declares; ``quick`` at 10 ms with 100 bytes, ``small`` at
    15 ms with 10 bytes. A step takes 1 ms more.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.clock, self.database = FakeClock(), Database(":memory:")
        self.native = FakeAlgorithm("native", self.clock, linear(0.02, 0.001), internal_bytes_per_sample=1000)
        self.quick = FakeAlgorithm("quick", self.clock, linear(0.01, 0.001), scratch_bytes_per_sample=100)
        self.small = FakeAlgorithm("small", self.clock, linear(0.015, 0.001), scratch_bytes_per_sample=10)
        self.slowdown: Callable[[Configuration], float] = lambda configuration: 1.0
        self.torch_bytes = 0  # beside the result

    @property
    def machine(self) -> Machine:
        algorithms = [self.native, self.quick, self.small]
        machine = fake_machine(self.clock, algorithms, lambda configuration: self.slowdown(configuration))

        def run_torch(problem: ConvProblem, operands: Operands) -> object:
            machine.run_torch(problem, operands)
            workspace = torch.empty(self.torch_bytes, dtype=torch.uint8)
            return torch.empty_like(operands.y), workspace

        return replace(machine, run_torch=run_torch)

    def compare(self, *limits: int) -> ResultFolder:
        layers = LayerTable("table", (Layer("layer", FORWARD, BATCH),))
        choices = Choices((BatchSizePolicy.POWER_OF_TWO,), (*limits, None), rounds=3, same_time=True)
        benchmark_convolutions(
            *("limits", layers, CONFIG, choices, self.out), machine=self.machine, database=self.database
        )
        return read_folder(self.out)

    def under(self, *limits: int) -> dict[tuple[str, int | None], dict[str, Any]]:
        return {(line["contestant"], line["limit_bytes"]): line for line in self.compare(*limits).lines}

    def same_time(self) -> tuple[int, int | None, str | None]:
        """Return the reference's workspace, the least of ours that is as fast, and its configuration."""
        *_, reference = (line for line in self.compare(200).lines if line["contestant"].startswith("torch"))
        return tuple(reference[name] for name in ("workspace_bytes", "same_time_bytes", "same_time_configuration"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "folder")


def test_limits_are_inclusive_and_ours_is_divided_where_that_is_faster(bench: Bench) -> None:
    found = {key: line["configuration"] for key, line in bench.under(9, 79, 200, 799, 800).items()}
    assert {limit: found["undivided", limit] for limit in (9, 79, 200, 799, 800, None)} == {
        **{9: None, 79: None, 200: "small 8"},
        **{799: "small 8", 800: "quick 8", None: "quick 8"},
    }
    assert {limit: found["mucudnn", limit] for limit in (9, 79, 200, 800)} == {
        9: None,
        79: "small 4×2",
        200: "quick 2×4",
        800: "quick 8",
    }


def test_whole_runs_choose_the_undivided(bench: Bench) -> None:
    """Alone ``quick`` is the faster one; as a whole run it is not."""
    bench.slowdown = lambda c: 3.0 if c.algorithms == ("quick",) else 1.0
    assert bench.under(800)["undivided", 800]["configuration"] == "small 8"


@contextmanager
def with_benchmark_mode(bench: Bench, per_sample_s: float) -> Iterator[Mapping[str, Runner]]:
    """Torch's benchmark mode finds an engine with other costs."""

    def benchmarked(function: Callable[[], Any], /) -> Any:
        before, bench.native.step_s = bench.native.step_s, linear(per_sample_s)
        try:
            return function()
        finally:
            bench.native.step_s = before

    yield {"torch": here, "torch-benchmark-10": benchmarked}


@pytest.mark.parametrize(
    ("per_sample_s", "wanted", "parts"),
    [(0.012, 100, "quick 1×8"), (0.0103, 200, "quick 2×4"), (0.00998, 800, "quick 8"), (0.005, None, None)],
)
def test_as_fast_as_torch_in_its_benchmark_mode_with_the_least_workspace(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, per_sample_s: float, wanted: int | None, parts: str | None
) -> None:
    """``quick`` takes 88, 84, 82 and 81 ms with micro-batches of 1, 2, 4 and 8; 2 % more count as the same."""
    bench.torch_bytes = 5 << 20
    monkeypatch.setattr(module, "torch_variants", lambda device: with_benchmark_mode(bench, per_sample_s))
    assert bench.same_time() == (5 << 20, wanted, parts)


def test_as_fast_counts_what_has_run_not_what_was_predicted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.slowdown = lambda c: 2.0 if c.micro_configs[0].micro_batch_size < 4 else 1.0
    monkeypatch.setattr(module, "torch_variants", lambda device: with_benchmark_mode(bench, 0.012))
    assert bench.same_time() == (0, 400, "quick 4×2")


def test_torchs_own_counts_with_what_it_takes_as_a_call(bench: Bench) -> None:
    """As an algorithm it declares its result, too. Nothing else is as fast here."""
    bench.quick.unsupported = bench.small.unsupported = "not here"
    bench.torch_bytes = 300
    assert bench.same_time() == (300, 300, "native 8")


def told(folder: ResultFolder) -> Sequence[str]:
    return [one if isinstance(one, str) else printed(one) for one in limits_tables(folder)]


def test_the_table_has_means_and_what_is_missing(bench: Bench) -> None:
    bench.torch_bytes = 5 << 20
    table, left_out, same_time, without = told(bench.compare(9, 200))
    cells = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in table.splitlines() if line.startswith("│")}
    assert {limit: [cell.strip() for cell in row] for limit, row in cells.items()} == {
        "9 B": ["", "", "", "0", "1", "1"],
        "200 B": ["1.44×", "1.44×", "1.44×", "1", "0", "0"],
        "no limit": ["1.00×", "1.00×", "1.00×", "1", "0", "0"],
    }
    assert left_out == ""
    assert "workspace for the time of torch within 2%: theirs / ours 5.00× (geometric mean of 1 problems" in same_time
    assert "less than 1 MiB counts as that: theirs in 0, ours in 1, both in 0" in same_time
    assert without.startswith("without a limit, ours against PyTorch: 1.99× (geometric mean), least 1.99×")
