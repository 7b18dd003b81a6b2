"""The network benchmark on a machine whose costs are known: both memory formats, sums, and what is measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, fake_machine, linear
from support.snapshots import assert_as_stored

from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.folders.rows import problem_of
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.suites.convolutions import benchmark as module
from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
from mucudnn.bench.suites.convolutions.choices import Choices
from mucudnn.bench.suites.convolutions.report import network_tables
from mucudnn.database.database import Database
from mucudnn.measuring.timing.timer import Runner, here
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning import workspaces
from mucudnn.words.config import Config
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

OTHER = replace(FORWARD, k=3)
BOTH = tuple(MemoryFormat)


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MachineLimits, "measured", lambda device, dtype: MachineLimits(200e3, 25e9))


class Bench:
    """Torch at 20 ms a sample; ``quick`` at 10 ms in contiguous tensors, and at 16 ms in those of channels_last."""

    def __init__(self, out: Path) -> None:
        self.out, self.clock, self.database = out, FakeClock(), Database(":memory:")
        self.quick = FakeAlgorithm("quick", self.clock, linear(0.01))
        algorithms = [FakeAlgorithm("native", self.clock, linear(0.02)), self.quick]
        machine: Machine = fake_machine(self.clock, algorithms)
        self.pace: Callable[[ConvProblem], float] = lambda problem: (
            1.0 if problem.memory_format == "contiguous" else 1.6
        )

        def whole_run(problem: ConvProblem, *args: Any, **how: Any) -> Callable[[], None]:
            return lambda: self._at_pace(problem, machine.whole_run(problem, *args, **how))

        self.machine = replace(machine, whole_run=whole_run)

    def _at_pace(self, problem: ConvProblem, call: Callable[[], object]) -> None:
        start_s = self.clock.seconds
        call()
        self.clock.advance((self.pace(problem) - 1) * (self.clock.seconds - start_s))

    def run(self, formats: tuple[MemoryFormat, ...] = BOTH, **how: Any) -> ResultFolder:
        table = LayerTable("mynet", (Layer(("first", "again"), FORWARD, 8, count=2), Layer("second", OTHER, 8)))
        choices = Choices(memory_formats=formats, rounds=3)
        config = Config(operations=(Operation.FORWARD,))
        benchmark_convolutions(
            *("network", table, config, choices, self.out), machine=self.machine, database=self.database, **how
        )
        return read_folder(self.out)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "folder")


def test_every_layer_is_measured_in_both_formats_and_the_next_run_measures_nothing(bench: Bench) -> None:
    folder = bench.run()
    assert folder.problems == ()
    rows = folder.rows
    assert len(rows) == 2 * 2 * 2  # layers, formats, contestants
    assert (rows.groupby("turns").size() == 4).all()
    assert {(row["layer"], problem_of(row)) for row in rows.to_dict("records")} == {
        (name, replace(problem, memory_format=memory_format))
        for name, problem in (("first, again", FORWARD), ("second", OTHER))
        for memory_format in MemoryFormat
    }
    spent_s = bench.clock.seconds
    assert bench.run().lines == folder.lines
    assert bench.clock.seconds == spent_s


def test_the_table_has_both_formats_and_sums_count_each_convolution_as_often_as_it_occurs(bench: Bench) -> None:
    table, left_out = network_tables(bench.run())
    assert_as_stored("bench-network", table)
    assert left_out == ""


def test_one_format(bench: Bench) -> None:
    folder = bench.run(formats=(MemoryFormat.CHANNELS_LAST,))
    assert set(folder.rows["memory_format"]) == {"channels_last"}
    table, _ = network_tables(folder)
    assert [str(column.header) for column in table.columns][4:6] == [
        "PyTorch ms channels_last",
        "mucudnn ms channels_last",
    ]


def test_torch_in_benchmark_mode_has_columns_of_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def variants(device: str) -> Iterator[Mapping[str, Runner]]:
        yield {"torch": here, "torch-benchmark-10": lambda function: function()}

    monkeypatch.setattr(module, "torch_variants", variants)
    folder = bench.run()
    assert set(folder.rows["contestant"]) == {"torch", "torch-benchmark-10", "mucudnn"}
    table, _ = network_tables(folder)
    assert "PyTorch-benchmark-10 ms contiguous" in [column.header for column in table.columns]


def test_what_seems_slower_is_measured_again(bench: Bench) -> None:
    """Where whole runs were faster when tuned, and are slower now: in one layer both times, in the other at first."""
    bench.pace = lambda problem: 1.0
    choose = bench.run(formats=BOTH[:1])
    assert "again_s" not in choose.rows
    looks = {OTHER.k: iter([1.0, 0.4, 0.4])}
    bench.out = bench.out.with_name("second")
    bench.pace = lambda problem: 2.5 if problem.k != OTHER.k else 2.5 * next(looks[OTHER.k], 0.4)
    rows = bench.run(formats=BOTH[:1]).rows
    ours = rows[rows["contestant"] == "mucudnn"].set_index("layer")
    assert ours.loc["first, again", "again_s"] == pytest.approx([0.2] * 6)
    assert ours.loc["first, again", "torch_again_s"] == pytest.approx([0.16] * 6)
    (table, _) = network_tables(read_folder(bench.out))
    assert "first, again forward contiguous 0.80× (0.80× to 0.80×)" in str(table.caption)


def test_progress_goes_from_tuning_to_the_end(bench: Bench) -> None:
    fractions: list[float] = []
    bench.run(progress=lambda text, fraction: fractions.append(fraction))
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] < 0.5 < fractions[-1] <= 1


def test_an_interrupted_tuning_leaves_a_folder_that_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workspaces, "choose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    folder = read_folder(bench.out)
    assert (len(folder.lines), {one.reason for one in folder.left_out}) == (0, {"the run was stopped before"})
