"""The network benchmark on a machine whose costs are known: both memory formats, sums, and what is measured again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.clock.known_machine import MadeUpMachine
from support.clock.machine import FORWARD, linear
from support.snapshots import assert_as_stored

from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.folders.rows import problem_of
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.suites.convolutions.contest import Choices
from mucudnn.bench.suites.convolutions.report import network_tables
from mucudnn.tuning import workspaces
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.results import Failure, MicroConfig

OTHER = replace(FORWARD, k=3)
BOTH = tuple(MemoryFormat)


@pytest.fixture
def bench(made_up_machine: MadeUpMachine) -> MadeUpMachine:
    """``quick`` takes 10 ms a sample in contiguous tensors, and 16 ms in those of channels_last; ``small`` is none."""
    made_up_machine.quick.step_s, made_up_machine.small.unsupported = linear(0.01), "not here"
    made_up_machine.quick.scratch_bytes_per_sample = 0
    made_up_machine.pace = lambda problem: 1.0 if problem.memory_format == "contiguous" else 1.6
    return made_up_machine


def run(bench: MadeUpMachine, formats: tuple[MemoryFormat, ...] = BOTH) -> ResultFolder:
    table = LayerTable("mynet", (Layer(("first", "again"), FORWARD, 8, count=2), Layer("second", OTHER, 8)))
    return bench.benchmark("network", table, Choices(memory_formats=formats, rounds=3))


def test_every_layer_is_measured_in_both_formats_and_the_next_run_measures_nothing(bench: MadeUpMachine) -> None:
    folder = run(bench)
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
    assert run(bench).lines == folder.lines
    assert bench.clock.seconds == spent_s


def test_the_table_has_both_formats_and_sums_count_each_convolution_as_often_as_it_occurs(bench: MadeUpMachine) -> None:
    table, left_out = network_tables(run(bench))
    assert_as_stored("bench-network", table)
    assert left_out == ""


def test_what_seems_slower_is_measured_again(bench: MadeUpMachine) -> None:
    """Where whole runs were faster when tuned, and are slower now: in one layer both times, in the other at first."""
    bench.pace = lambda problem: 1.0
    choose = run(bench, formats=BOTH[:1])
    assert "again_s" not in choose.rows
    looks = {OTHER.k: iter([1.0, 0.4, 0.4])}
    bench.out = bench.out.with_name("second")
    bench.pace = lambda problem: 2.5 if problem.k != OTHER.k else 2.5 * next(looks[OTHER.k], 0.4)
    rows = run(bench, formats=BOTH[:1]).rows
    ours = rows[rows["contestant"] == "mucudnn"].set_index("layer")
    assert ours.loc["first, again", "again_s"] == pytest.approx([0.2] * 6)
    assert ours.loc["first, again", "torch_again_s"] == pytest.approx([0.16] * 6)
    (table, _) = network_tables(read_folder(bench.out))
    assert "first, again forward contiguous 0.80× (0.80× to 0.80×)" in str(table.caption)


def test_torch_s_own_is_not_run_where_it_is_barred(bench: MadeUpMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Failure(MicroConfig("native", 8), "native: it is too slow to measure")
    monkeypatch.setattr(TunedProblem, "barred", slow)
    rows = run(bench).rows
    assert set(rows[rows["contestant"] == "torch"]["failure"]) == {slow.reason}
    assert rows[rows["contestant"] == "mucudnn"]["time_s"].notna().all()


def test_an_interrupted_tuning_leaves_a_folder_saying_so(bench: MadeUpMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workspaces, "choose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(bench)
    folder = read_folder(bench.out)
    assert (len(folder.lines), {one.reason for one in folder.left_out}) == (0, {"the run was stopped before"})
