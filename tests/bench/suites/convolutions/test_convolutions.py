"""DeepBench on a machine whose costs are known: who is chosen under which limit, what is kept, and where it goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, FakeClock, fake_machine, linear

from mucudnn.bench.contests.bounds import kind_of_layer
from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.folders.rows import problem_of
from mucudnn.bench.sources.layers import Layer, LayerTable, load_source
from mucudnn.bench.suites.convolutions.benchmark import Balance, Wanted, benchmark_convolutions
from mucudnn.bench.suites.convolutions.choices import Choices
from mucudnn.bench.suites.convolutions.report import deepbench_tables, left_out_in_words
from mucudnn.database.database import Database
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import Machine
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.problem import ConvProblem, Operation

BATCH = 8
CONFIG = Config(operations=(Operation.FORWARD,))
POLICIES = (BatchSizePolicy.POWER_OF_TWO,)


def table(*problems: ConvProblem) -> LayerTable:
    return LayerTable("table", tuple(Layer(f"layer {p.k}", p, BATCH, count=2) for p in problems))


class Bench:
    """Torch at 20 ms a sample, ``quick`` at 10 ms with 100 bytes each, ``small`` at 15 ms with none."""

    def __init__(self) -> None:
        self.clock, self.database = FakeClock(), Database(":memory:")
        native = FakeAlgorithm("native", self.clock, linear(0.02))
        quick = FakeAlgorithm("quick", self.clock, linear(0.01, 0.001), scratch_bytes_per_sample=100)
        small = FakeAlgorithm("small", self.clock, linear(0.015, 0.001))
        self.machine: Machine = fake_machine(self.clock, [native, quick, small])

    def run(
        self, out: Path, *limits: int | None, problems: Sequence[ConvProblem] = (FORWARD,), time_s: float | None = None
    ) -> ResultFolder:
        choices = Choices(POLICIES, limits, rounds=3, time_limit_s=time_s)
        benchmark_convolutions(
            *("deepbench", table(*problems), CONFIG, choices, out), machine=self.machine, database=self.database
        )
        return read_folder(out)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_each_limit_has_its_own_choices(bench: Bench, tmp_path: Path) -> None:
    """400 bytes hold half of the mini-batch: the undivided is small, ours is quick in two halves."""
    read = bench.run(tmp_path, 400, None)
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
    assert set(read.rows["turns"]) == {1}
    assert set(read.rows["count"]) == {2}
    assert set(map(len, read.rows["samples_s"])) == {4}  # until 0.5 s for each of four: a round takes 0.44 s


def test_what_was_measured_to_choose_from_is_kept(bench: Bench, tmp_path: Path) -> None:
    """The undivided and the policies share a line: all sizes of all, and the front of quick, in parts of any size."""
    read = bench.run(tmp_path, 400, None)
    measured = read.candidates.measured
    steps = {(row["algorithm"], row["micro_batch_size"]): row["step_s"] for row in measured.to_dict("records")}
    assert steps["quick", 8] == pytest.approx(0.081)
    assert steps["quick", 4] == pytest.approx(0.041)
    assert steps["native", 8] == pytest.approx(0.16)
    assert all(measured["step_samples_s"].map(len) > 0)
    points = read.candidates.desirable
    assert list(points["workspace_bytes"]) == sorted(points["workspace_bytes"])
    assert list(points["configuration"])[-1] == "quick 8"
    ours = read.rows[read.rows["contestant"] != "torch"]
    assert (ours["tuning_s"] >= 0).all()
    assert (ours["solve_s"] > 0).all()


def test_what_runs_in_the_same_way_is_run_once(bench: Bench, tmp_path: Path) -> None:
    read = bench.run(tmp_path, 800, None)
    ours = read.rows[read.rows["contestant"] != "torch"]
    assert len(ours) == 4
    assert len({tuple(samples) for samples in ours["samples_s"]}) == 1


def test_what_fits_no_limit_has_a_row_with_the_reason(bench: Bench, tmp_path: Path) -> None:
    machine = bench.machine
    native, quick, _ = machine.algorithms
    bench.machine = replace(machine, algorithms=[replace(native, internal_bytes_per_sample=50), quick])
    read = bench.run(tmp_path, 10, None)
    failed = read.rows[read.rows["failure"].notna()]
    assert set(zip(failed["contestant"], failed["limit_bytes"], strict=True)) == {("undivided", 10), ("mucudnn", 10)}
    assert all("no configuration fits" in reason for reason in failed["failure"])
    assert (read.rows["time_s"].isna() == read.rows["failure"].notna()).all()


def test_torch_that_has_no_memory_is_told_and_the_others_are_timed(bench: Bench, tmp_path: Path) -> None:
    machine = bench.machine

    def run_torch(problem: ConvProblem, operands: Operands) -> object:
        if is_timed:
            raise RuntimeError("no memory for that")
        return machine.run_torch(problem, operands)

    is_timed = False
    bench.machine = replace(machine, run_torch=run_torch)
    bench.run(tmp_path / "first", None)  # all is chosen, and known
    is_timed = True
    read = bench.run(tmp_path / "second", None)
    by_contestant = read.rows.set_index("contestant")
    assert by_contestant.loc["torch", "failure"] == "no memory for that"
    assert by_contestant.loc["mucudnn", "time_s"] == pytest.approx(0.081)


def test_a_run_that_was_stopped_goes_on(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [replace(FORWARD, k=k) for k in (1, 2, 3)]
    rows_file = tmp_path / "rows.jsonl"
    bench.run(tmp_path, None, problems=problems)
    whole = rows_file.read_text().splitlines(keepends=True)
    rows_file.write_text("".join(whole[:3]) + whole[3][:50])  # the first problem, and half a line of the second
    spent_s = bench.clock.seconds
    read = bench.run(tmp_path, None, problems=problems)
    assert sorted(read.rows["layer"].unique()) == ["layer 1", "layer 2", "layer 3"]
    assert (read.left_out, len(read.rows)) == ((), 9)
    again_s = bench.clock.seconds
    bench.run(tmp_path, None, problems=problems)
    assert again_s > spent_s
    assert bench.clock.seconds == again_s


def test_a_time_limit_leaves_out_and_tells_and_a_later_run_goes_on(bench: Bench, tmp_path: Path) -> None:
    problems = [replace(FORWARD, k=k) for k in (1, 2, 3)]
    read = bench.run(tmp_path, None, problems=problems, time_s=1e-6)
    assert list(read.rows["layer"].unique()) == ["layer 1"]  # the first is always begun
    assert [one.what.split(",")[0] for one in read.left_out] == ["layer 2", "layer 3"]
    assert "would not have sufficed" in read.left_out[0].reason
    assert left_out_in_words(read).startswith("left out: 2 problems, as the 1 us would not have sufficed: layer 2, ")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["wanted"], summary["measured"]) == (3, 1)
    assert bench.run(tmp_path, None, problems=problems).left_out == ()


def test_ctrl_c_keeps_what_is_measured_and_says_what_is_left(bench: Bench, tmp_path: Path) -> None:
    problems = [replace(FORWARD, k=k) for k in (1, 2)]
    machine = bench.machine

    def run_torch(problem: ConvProblem, operands: Operands) -> object:
        if problem.k == 2:
            raise KeyboardInterrupt
        return machine.run_torch(problem, operands)

    bench.machine = replace(machine, run_torch=run_torch)
    with pytest.raises(KeyboardInterrupt):
        bench.run(tmp_path, None, problems=problems)
    read = read_folder(tmp_path)
    assert list(read.rows["layer"].unique()) == ["layer 1"]
    assert [one.reason for one in read.left_out] == ["the run was stopped before"]


def in_order(every: Sequence[Wanted], met: Sequence[Wanted] = ()) -> list[Wanted]:
    """Return all in the order in which they are picked."""
    balance, left, found = Balance(met), [*every], []
    while left:
        found.append(balance.next_of(left))
        left.remove(found[-1])
        balance.meet(found[-1])
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
    assert Balance(met_forward).next_of(every)[1].operation is not Operation.FORWARD


def test_the_table_has_means_of_speedups(bench: Bench, tmp_path: Path) -> None:
    printed, _ = deepbench_tables(bench.run(tmp_path, 400, None))
    cells = list(zip(*(column._cells for column in printed.columns), strict=True))
    assert [row[:3] for row in cells] == [
        ("undivided", "undivided", "400 B"),
        ("undivided", "undivided", "no limit"),
        ("mucudnn", "power-of-two", "400 B"),
        ("mucudnn", "power-of-two", "no limit"),
    ]
    assert cells[2][3:] == ("1", "1.95×", "", "", "1.95×")


def test_rows_have_the_whole_problem(bench: Bench, tmp_path: Path) -> None:
    read = bench.run(tmp_path, None)
    assert {problem_of(row) for row in read.rows.to_dict("records")} == {FORWARD}
    assert (read.header.benchmark, read.header.environment) == ("deepbench", ENVIRONMENT)
    assert read.header.settings["policy"] == ["power-of-two"]
