"""Convolutions on a machine whose costs are known: the choice under each limit, what is kept, and resumed runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.clock.known_machine import MadeUpMachine
from support.clock.machine import FORWARD, linear
from support.snapshots import assert_as_stored

from mucudnn.bench.results.bounds import kind_of_layer
from mucudnn.bench.results.reading import ResultFolder, problem_of, read_folder
from mucudnn.bench.sources.layers import Layer, LayerTable, load_source
from mucudnn.bench.suites import convolutions
from mucudnn.bench.suites.convolutions import Compared, convolutions_tables, least_met, left_out_in_words
from mucudnn.core.answers import TunedProblem
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Failure, MicroConfig
from mucudnn.core.tables import Table
from mucudnn.store.database import Database
from mucudnn.tuning import tuner

BATCH = 8
Wanted = tuple[Layer, ConvProblem]


def run(
    bench: MadeUpMachine, *limits: int | None, problems: Sequence[ConvProblem] = (FORWARD,), **choices: Any
) -> ResultFolder:
    table = LayerTable("table", tuple(Layer(f"layer {p.k}", p, BATCH, count=2) for p in problems))
    return bench.benchmark(table, Compared(limits=limits, rounds=3, **choices))


def test_each_limit_has_its_own_choices(made_up_machine: MadeUpMachine) -> None:
    """400 bytes hold half of the mini-batch: the undivided is small, ours is quick in two halves."""
    read = run(made_up_machine, 400, None)
    assert read.problems == ()
    found = {
        (row["contestant"], None if row["limit_bytes"] != row["limit_bytes"] else row["limit_bytes"]): row
        for row in read.rows.to_dict("records")
    }
    assert {key: row["configuration"] for key, row in found.items() if key[0] != "torch"} == {
        ("undivided", 400): "small 8",
        ("mucudnn", 400): "quick 4×2",
        ("undivided", None): "quick 8",
        ("mucudnn", None): "quick 8",
    }
    assert {key: row["time_s"] for key, row in found.items()} == pytest.approx(
        {
            ("torch", None): 0.16,
            ("undivided", 400): 0.121,
            ("mucudnn", 400): 0.082,
            ("undivided", None): 0.081,
            ("mucudnn", None): 0.081,
        }
    )
    assert found["mucudnn", 400]["workspace_bytes"] == 400
    assert found["mucudnn", None]["samples_s"] == found["undivided", None]["samples_s"]  # the same call is timed once
    assert set(read.rows["turns"]) == {1}
    assert set(read.rows["count"]) == {2}
    assert set(map(len, read.rows["samples_s"])) == {4}  # until 0.5 s for each of four: a round takes 0.44 s


def test_what_fits_no_limit_has_a_row_with_the_reason(made_up_machine: MadeUpMachine) -> None:
    made_up_machine.native.internal_bytes_per_sample, made_up_machine.small.unsupported = 50, "not here"
    read = run(made_up_machine, 10, None)
    failed = read.rows[read.rows["failure"].notna()]
    assert set(zip(failed["contestant"], failed["limit_bytes"], strict=True)) == {("undivided", 10), ("mucudnn", 10)}
    assert all("no configuration fits" in reason for reason in failed["failure"])
    assert (read.rows["time_s"].isna() == read.rows["failure"].notna()).all()


def test_torch_that_has_no_memory_is_told_and_the_others_are_timed(made_up_machine: MadeUpMachine) -> None:
    def fail(problem: ConvProblem) -> None:
        raise RuntimeError("no memory for that")

    run(made_up_machine, None)  # all is chosen, and known
    made_up_machine.out, made_up_machine.before_torch = made_up_machine.out.with_name("second"), fail
    by_contestant = run(made_up_machine, None).rows.set_index("contestant")
    assert by_contestant.loc["torch", "failure"] == "no memory for that"
    assert by_contestant.loc["mucudnn", "time_s"] == pytest.approx(0.081)


def test_a_run_that_was_stopped_goes_on(made_up_machine: MadeUpMachine) -> None:
    problems = [replace(FORWARD, k=k) for k in (1, 2, 3)]
    rows_file = made_up_machine.out / "rows.jsonl"
    run(made_up_machine, None, problems=problems)
    whole = rows_file.read_text().splitlines(keepends=True)
    rows_file.write_text("".join(whole[:3]) + whole[3][:50])  # the first problem, and half a line of the second
    spent_s = made_up_machine.clock.seconds
    read = run(made_up_machine, None, problems=problems)
    assert sorted(read.rows["layer"].unique()) == ["layer 1", "layer 2", "layer 3"]
    assert (read.left_out, len(read.rows)) == ({}, 9)
    again_s = made_up_machine.clock.seconds
    run(made_up_machine, None, problems=problems)
    assert again_s > spent_s
    assert made_up_machine.clock.seconds == again_s


def test_a_time_limit_leaves_out_and_tells_and_a_later_run_goes_on(made_up_machine: MadeUpMachine) -> None:
    problems = [replace(FORWARD, k=k) for k in (1, 2, 3)]
    read = run(made_up_machine, None, problems=problems, time_limit_s=1e-6)
    assert list(read.rows["layer"].unique()) == ["layer 1"]  # the first is always begun
    ((reason, subjects),) = read.left_out.items()
    assert "would not have sufficed" in reason
    assert [subject.split(",")[0] for subject in subjects] == ["layer 2", "layer 3"]
    assert left_out_in_words(read).startswith("left out: 2 problems, as the 1 us would not have sufficed: layer 2, ")
    summary = json.loads((made_up_machine.out / "summary.json").read_text())
    assert (summary["wanted"], summary["measured"]) == (3, 1)
    assert run(made_up_machine, None, problems=problems).left_out == {}


def test_ctrl_c_keeps_what_is_measured_and_says_what_is_left(made_up_machine: MadeUpMachine) -> None:
    def interrupt(problem: ConvProblem) -> None:
        if problem.k == 2:
            raise KeyboardInterrupt

    made_up_machine.before_torch = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(made_up_machine, None, problems=[replace(FORWARD, k=k) for k in (1, 2)])
    read = read_folder(made_up_machine.out)
    assert list(read.rows["layer"].unique()) == ["layer 1"]
    assert [*read.left_out] == ["the run was stopped before"]


def in_order(every: Sequence[Wanted], met: Sequence[Wanted] = ()) -> list[Wanted]:
    """Return all in the order in which they are picked."""
    left, found = [*every], list[Wanted]()
    while left:
        found.append(least_met(left, [*met, *found]))
        left.remove(found[-1])
    return found


def kinds_of(every: Sequence[Wanted]) -> list[str]:
    return [kind_of_layer(problem) for _, problem in every]


def test_every_kind_of_layer_comes_before_the_second_of_any() -> None:
    every = load_source("deepbench-train").problems(tuple(Operation))
    ordered = in_order(every)
    assert sorted(ordered, key=str) == sorted(every, key=str)
    first = ordered[: len(set(kinds_of(every)))]
    assert len(set(kinds_of(first))) == len(first) >= 5
    assert {problem.operation for _, problem in first[:3]} == {*Operation}
    of_one = [problem.flops(layer.batch_size) for layer, problem in ordered if kind_of_layer(problem) == "3x3"]
    assert of_one[0] == min(of_one)


def test_a_later_run_goes_on_with_what_the_earlier_one_did_not_meet() -> None:
    every = load_source("deepbench-train").problems(tuple(Operation))
    kinds = len(set(kinds_of(every)))
    met = in_order(every)[:2]
    rest = in_order([one for one in every if one not in met], met)
    assert len({*kinds_of(met), *kinds_of(rest[: kinds - 2])}) == kinds
    assert rest[0][1].operation not in {problem.operation for _, problem in met}


def test_where_one_kind_of_layer_does_not_fit_its_operations_are_those_of_another() -> None:
    """With one layer of each of two kinds, and time for the first alone, all three operations are picked."""
    small, large = (Layer((f"layer {r}",), replace(FORWARD, c=8, h=9, w=9, r=r, s=r), BATCH) for r in (3, 5))
    every = LayerTable("table", (small, large)).problems(tuple(Operation))
    assert [layer for layer, _ in in_order(every)[:2]] == [small, large]
    picked = in_order([one for one in every if one[0] == small])
    assert {problem.operation for _, problem in picked[:3]} == {*Operation}
    met_forward = [one for one in every if one[1].operation is Operation.FORWARD]
    assert least_met(every, met_forward)[1].operation is not Operation.FORWARD


def test_the_summary_has_means_of_speedups(made_up_machine: MadeUpMachine) -> None:
    summary, *_ = convolutions_tables(run(made_up_machine, 400, None))
    assert isinstance(summary, Table)
    lines = [dict(zip((column.title for column in summary.columns), row, strict=True)) for row in summary.rows]
    limit = "workspace limit, MiB"
    assert [(line["contestant"], line["policy"], bool(line[limit])) for line in lines] == [
        ("torch", "", False),
        ("undivided", "undivided", True),
        ("undivided", "undivided", False),
        ("mucudnn", "power-of-two", True),
        ("mucudnn", "power-of-two", False),
    ]
    within = lines[3]
    assert (within["sum, ms"], within["forward"], within["over undivided"]) == ("164.0000", "1.951", "1.476")
    assert [line["same configuration"] for line in lines] == ["", "", "", "", "1"]


@pytest.fixture
def in_formats(made_up_machine: MadeUpMachine) -> MadeUpMachine:
    """``quick`` takes 10 ms a sample in contiguous tensors, and 16 ms in those of channels_last; ``small`` is none."""
    made_up_machine.quick.step_s, made_up_machine.small.unsupported = linear(0.01), "not here"
    made_up_machine.quick.scratch_bytes_per_sample = 0
    made_up_machine.pace = lambda problem: 1.0 if problem.memory_format == "contiguous" else 1.6
    return made_up_machine


FORMATS = tuple(MemoryFormat)


def network(bench: MadeUpMachine, **choices: Any) -> ResultFolder:
    layers = (Layer(("first", "again"), FORWARD, 8, count=2), Layer("second", replace(FORWARD, k=3), 8))
    return bench.benchmark(LayerTable("mynet", layers), Compared(memory_formats=FORMATS, rounds=3, **choices))


def told(folder: ResultFolder) -> str:
    """Return the last text, which compares PyTorch with mucudnn."""
    return str([*convolutions_tables(folder)][-1])


def test_every_layer_is_measured_in_every_dtype_and_format(in_formats: MadeUpMachine) -> None:
    folder = network(in_formats, dtypes=("float32", "bfloat16"))
    assert folder.problems == ()
    rows = folder.rows
    assert len(rows) == 2 * 2 * 2 * 3  # layers, dtypes, formats, contestants
    assert (rows.groupby("turns").size() == 12).all()
    assert {(row["layer"], problem_of(row)) for row in rows.to_dict("records")} == {
        (name, replace(problem, dtype=dtype, memory_format=memory_format))
        for name, problem in (("first, again", FORWARD), ("second", replace(FORWARD, k=3)))
        for dtype in ("float32", "bfloat16")
        for memory_format in FORMATS
    }
    assert [one for one in convolutions_tables(folder) if "better" in str(one)] == [
        "float32: better PyTorch / better mucudnn: 2.00×",
        "bfloat16: better PyTorch / better mucudnn: 2.00×",
    ]
    spent_s = in_formats.clock.seconds
    assert network(in_formats, dtypes=("float32", "bfloat16")).lines == folder.lines
    assert in_formats.clock.seconds == spent_s


def test_the_tables_have_both_formats_and_sums_count_each_convolution_as_often_as_it_occurs(
    in_formats: MadeUpMachine,
) -> None:
    assert_as_stored("bench-convolutions", *convolutions_tables(network(in_formats)))


def test_a_budget_is_divided_over_the_table_in_each_format(made_up_machine: MadeUpMachine) -> None:
    rows = network(made_up_machine, budgets=(1000, 0)).rows
    divided = (
        rows[rows["contestant"] == "mucudnn-wd"].groupby(["limit_bytes", "memory_format"])["workspace_bytes"].sum()
    )
    assert {key: int(total) for key, total in divided.items() if key[0] == 0} == {(0, name): 0 for name in FORMATS}
    assert all(800 <= total <= 1000 for key, total in divided.items() if key[0] == 1000)


def test_torch_is_not_run_where_it_is_too_slow(in_formats: MadeUpMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Failure(MicroConfig("native", 8), "native: it is too slow to measure", least_s=4.0)
    monkeypatch.setattr(TunedProblem, "barred", slow)
    folder = network(in_formats)
    rows = folder.rows
    assert set(rows[rows["contestant"] == "torch"]["failure"]) == {slow.reason}
    assert rows[rows["contestant"] == "mucudnn"]["time_s"].notna().all()
    assert told(folder) == "better PyTorch / better mucudnn: more than 50.00×"


def test_an_interrupted_tuning_leaves_a_folder_saying_so(
    in_formats: MadeUpMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "choose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        network(in_formats)
    folder = read_folder(in_formats.out)
    assert (folder.lines, [*folder.left_out]) == ((), ["the run was stopped before"])


def test_limits_are_inclusive_and_whole_runs_decide(made_up_machine: MadeUpMachine) -> None:
    """Alone ``quick`` is the faster one; as a whole run it is not."""
    made_up_machine.small.scratch_bytes_per_sample = 10
    made_up_machine.native.internal_bytes_per_sample = 1000
    rows = run(made_up_machine, 79, 800, None).rows
    found = {(row["contestant"], row["limit_bytes"]): row["configuration"] for row in rows.to_dict("records")}
    assert str(found["undivided", 79]) == "nan"
    assert (found["mucudnn", 79], found["undivided", 800]) == ("small 4×2", "quick 8")
    made_up_machine.out, made_up_machine.database = made_up_machine.out.with_name("second"), Database(":memory:")
    made_up_machine.slowdown = lambda c: 3.0 if c.algorithms == ("quick",) else 1.0
    rows = run(made_up_machine, 800).rows
    assert set(rows[rows["contestant"] == "undivided"]["configuration"]) == {"small 8"}


def test_tables_of_a_folder_without_any_time(made_up_machine: MadeUpMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no memory for that")

    monkeypatch.setattr(convolutions, "training_operands", fail)
    folder = run(made_up_machine, 400, None)
    assert folder.rows["time_s"].isna().all()
    assert "PyTorch: no time in 1 rows, as no memory for that" in [*convolutions_tables(folder)]
    assert told(folder) == ""
