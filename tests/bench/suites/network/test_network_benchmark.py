"""The network benchmark on a table of two tiny layers, with a clock that is wound by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.clock.ticking import TickingClock

from mucudnn.bench.contests.timing import Contestant, MedianTime
from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.folders.rows import problem_of
from mucudnn.bench.sources import table_tuning
from mucudnn.bench.sources.layers import LayerTable, load_source
from mucudnn.bench.sources.table_tuning import table_tasks, tune_table
from mucudnn.bench.suites.network import benchmark as network_benchmark
from mucudnn.bench.suites.network.benchmark import benchmark_network
from mucudnn.bench.suites.network.report import network_record, network_table
from mucudnn.bench.suites.network.result import NetworkBenchmark
from mucudnn.measuring.timing.timer import Clock, Runner, here
from mucudnn.tuning.result import TuningInterrupted
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat, Operation

CSV = """\
name,c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w
first,4,8,8,4,3,3,1,1,1,1
second,4,8,8,4,1,1,0,0,1,1
"""


@pytest.fixture
def table(tmp_path: Path) -> LayerTable:
    (tmp_path / "layers.csv").write_text(CSV)
    return load_source(str(tmp_path / "layers.csv"), batch=2)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(algorithms=("gemm",), time_limit="50ms", database=tmp_path / "measurements.sqlite")


@pytest.fixture
def benchmark(table: LayerTable, config: Config) -> NetworkBenchmark:
    return benchmark_network(table, config, rounds=3, clock=TickingClock())


def test_every_operation_of_every_layer_is_measured_in_both_formats(benchmark: NetworkBenchmark) -> None:
    assert [(*p.names, p.operation) for p in benchmark.problems] == [
        (layer, operation) for layer in ("first", "second") for operation in Operation
    ]
    for problem in benchmark.problems:
        assert set(problem.formats) == set(MemoryFormat)
        for memory_format, result in problem.formats.items():
            assert result.tuned.problem.memory_format is memory_format
            assert result.tuned.problem.operation is problem.operation


def test_times_are_the_clocks(benchmark: NetworkBenchmark) -> None:
    cells = [cell for p in benchmark.problems for r in p.formats.values() for cell in (r.torch, r.mucudnn)]
    assert {cell.time_s for cell in cells} == {1.0}
    assert {cell.noise for cell in cells} == {0.0}
    assert benchmark.speedup_best == 1.0


def test_one_format_and_one_operation(table: LayerTable, config: Config) -> None:
    only = replace(config, operations=(Operation.FORWARD,))
    benchmark = benchmark_network(
        table, only, memory_formats=[MemoryFormat.CHANNELS_LAST], rounds=1, clock=TickingClock()
    )
    assert benchmark.memory_formats == (MemoryFormat.CHANNELS_LAST,)
    assert len(benchmark.problems) == 2


def test_the_variants_run_in_turns(table: LayerTable, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    tune_table(table, config)
    order: list[str] = []
    run_torch, whole_run = network_benchmark.run_torch, network_benchmark.whole_run

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (order.append(name), call(*args))[1]

    monkeypatch.setattr(network_benchmark, "run_torch", noted("run_torch", run_torch))
    monkeypatch.setattr(network_benchmark, "whole_run", lambda *args: noted("run_whole", whole_run(*args)))
    first = replace(table, layers=table.layers[:1])
    only = replace(config, operations=(Operation.FORWARD,))
    benchmark_network(first, only, rounds=3, clock=TickingClock())
    rounds = [order[:8], order[8:12], order[12:]]  # a warm-up before each first sample
    assert [sorted(each) for each in rounds] == [["run_torch"] * n + ["run_whole"] * n for n in (4, 2, 2)]


def test_torch_in_benchmark_mode_has_cells_of_its_own(
    table: LayerTable, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: each variant is called in its place, and its times are columns beside torch's."""
    calls = 0

    def elsewhere(function: Callable[[], Any], /) -> Any:
        nonlocal calls
        calls += 1
        return function()

    @contextmanager
    def variants(device: str) -> Iterator[Mapping[str, Runner]]:
        yield {"torch": here, "torch-benchmark-10": elsewhere}

    monkeypatch.setattr(network_benchmark, "torch_variants", variants)
    only = replace(config, operations=(Operation.FORWARD,))
    benchmark = benchmark_network(table, only, rounds=3, clock=TickingClock())
    assert calls == 3 * 2 * 2  # rounds, layers, formats
    assert benchmark.torch_benchmarks == ("torch-benchmark-10",)
    assert benchmark.torch_benchmark_s("torch-benchmark-10", MemoryFormat.CONTIGUOUS) == 2.0
    record = network_record(benchmark)
    assert record["problems"][0]["torch_benchmark_10_channels_last_s"] == 1.0
    assert record["total"]["torch_benchmark_10_contiguous_s"] == 2.0
    assert "torch-benchmark-10 ms contiguous" in [column.header for column in network_table(benchmark).columns]


def test_the_cpu_has_no_benchmark_mode(benchmark: NetworkBenchmark) -> None:
    assert benchmark.torch_benchmarks == ()
    assert not [key for key in network_record(benchmark)["total"] if "benchmark" in key]


def test_progress_goes_from_tuning_to_the_end(table: LayerTable, config: Config) -> None:
    fractions: list[float] = []
    benchmark_network(
        table, config, rounds=1, clock=TickingClock(), progress=lambda text, fraction: fractions.append(fraction)
    )
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] < 0.5 < fractions[-1] <= 1


def test_an_interrupted_tuning_keeps_the_rows_that_are_ready(
    table: LayerTable, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_the_first = [task for task in table_tasks(table, config) if task.name.startswith("first")]
    complete = table_tuning.tune_tasks(of_the_first, config)

    def interrupted(*args: object, **kwargs: object) -> None:
        raise TuningInterrupted(complete)

    monkeypatch.setattr(table_tuning, "tune_tasks", interrupted)
    tuning = tune_table(table, config)
    assert tuning.interrupted
    assert [row.names for row in tuning.rows] == [("first",)] * 3
    with pytest.raises(KeyboardInterrupt):
        benchmark_network(table, config)


def test_a_result_folder_has_every_sample_and_the_next_run_measures_nothing(
    table: LayerTable, config: Config, tmp_path: Path
) -> None:
    out, config = tmp_path / "results", replace(config, algorithms=("native",))  # both tunings choose alike
    first = benchmark_network(table, config, rounds=3, clock=TickingClock(), out=out)
    read = read_folder(out)
    assert (len(read.rows), read.problems) == (2 * 3 * 2 * 2, ())  # layers, operations, formats, contestants
    assert set(read.rows["contestant"]) == {"torch", "mucudnn"}
    assert len(read.samples) == 3 * len(read.rows)
    assert {problem_of(row) for row in read.rows.to_dict("records")} == {
        result.tuned.problem for problem in first.problems for result in problem.formats.values()
    }
    again = benchmark_network(table, config, rounds=3, clock=NoClock(), out=out)
    assert [p.formats.keys() for p in again.problems] == [p.formats.keys() for p in first.problems]
    for new, old in zip(again.problems, first.problems, strict=True):
        assert [(r.torch, r.mucudnn) for r in new.formats.values()] == [
            (r.torch, r.mucudnn) for r in old.formats.values()
        ]
    assert len((out / "rows.jsonl").read_text().splitlines()) == len(read.rows)


def test_what_was_measured_of_another_configuration_is_measured_again(
    table: LayerTable, config: Config, tmp_path: Path
) -> None:
    out = tmp_path / "results"
    benchmark_network(table, config, rounds=1, clock=TickingClock(), out=out)
    rows = out / "rows.jsonl"
    rows.write_text(re.sub(r'("configuration": )"[^"]+"', r'\1"something else"', rows.read_text()))
    benchmark_network(table, config, rounds=1, clock=TickingClock(), out=out)
    assert "something else" not in set(read_folder(out).rows["configuration"])


def test_what_seems_slower_is_looked_at_again(
    table: LayerTable, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of four convolutions is slower twice, the second only at first; sums are those of the first looks."""
    asked: list[int] = []
    ours_s = iter((1.25, 1.25, 1.0, 1.03, 1.6, 0.8))

    def timed(contestants: Sequence[Contestant], rounds: int, clock: Clock) -> list[MedianTime]:
        asked.append(rounds)
        return [MedianTime.of_samples([1.0] * rounds), MedianTime.of_samples([next(ours_s)] * rounds)]

    monkeypatch.setattr(network_benchmark, "time_in_turns", timed)
    only = replace(config, operations=(Operation.FORWARD, Operation.BACKWARD_DATA))
    formats = [MemoryFormat.CONTIGUOUS]
    benchmark = benchmark_network(table, only, memory_formats=formats, rounds=2, clock=TickingClock())
    assert asked == [2, 2, 2, 2, 4, 4]
    looks = benchmark.second_looks
    assert [(look.first.names, look.first.operation) for look in looks] == [
        (("first",), operation) for operation in only.operations
    ]
    assert [look.is_confirmed for look in looks] == [True, False]
    assert benchmark.mucudnn_s(MemoryFormat.CONTIGUOUS) == pytest.approx(1.25 + 1.25 + 1.0 + 1.03)
    told = str(network_table(benchmark).caption)
    assert "0.97 of torch: 2" in told
    assert "first forward contiguous 0.62× (0.62× to 0.62×)" in told
    assert "backward-data" not in told
    record = network_record(benchmark)["second_looks"]
    assert [(one["layer"], one["is_confirmed"]) for one in record] == [("first", True), ("first", False)]
    assert record[0]["mucudnn_samples_s"] == (1.6,) * 4


def test_without_losses_there_is_no_second_look(benchmark: NetworkBenchmark) -> None:
    assert benchmark.second_looks == ()
    assert "second look" not in str(network_table(benchmark).caption)


class NoClock(TickingClock):
    """A clock that nothing may be timed by."""

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        raise AssertionError("something was measured")
