"""The comparison under workspace limits, on a machine whose costs are known: who is the rival, what is ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, fake_machine, linear, made_ready
from support.cudnn.backend import PICKY, RANDOM, STEADY, FakeBackend

from mucudnn.bench.contests.timing import Contestant
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.suites.limits import benchmark as limits_benchmark
from mucudnn.bench.suites.limits import contest as limits_contest
from mucudnn.bench.suites.limits.benchmark import compare_under_limits
from mucudnn.bench.suites.limits.result import LimitsComparison, Run, UnderLimit
from mucudnn.database.database import Database
from mucudnn.kernels.cudnn.algorithms import CudnnEngines
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.timing.timer import Runner, here
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning.result import TuningInterrupted
from mucudnn.words.config import Config
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig

BATCH = 8
OTHER = replace(FORWARD, k=3)
CONFIG = Config(operations=(Operation.FORWARD,))


def table(*problems: ConvProblem) -> LayerTable:
    return LayerTable("table", tuple(Layer(f"layer {p.k}", p, BATCH) for p in problems))


class Bench:
    """Torch at 20 ms a sample with 1000 bytes each that it declares; ``quick`` at 10 ms with 100 bytes, ``small`` at
    15 ms with 10 bytes. A step takes 1 ms more.
    """

    def __init__(self) -> None:
        self.clock, self.database = FakeClock(), Database(":memory:")
        self.native = FakeAlgorithm("native", self.clock, linear(0.02, 0.001), internal_bytes_per_sample=1000)
        self.quick = FakeAlgorithm("quick", self.clock, linear(0.01, 0.001), scratch_bytes_per_sample=100)
        self.small = FakeAlgorithm("small", self.clock, linear(0.015, 0.001), scratch_bytes_per_sample=10)
        self.slowdown: Callable[[Configuration], float] = lambda configuration: 1.0
        self.torch_bytes = 0  # beside the result

    @property
    def algorithms(self) -> list[FakeAlgorithm]:
        return [self.native, self.quick, self.small]

    @property
    def machine(self) -> Machine:
        machine = fake_machine(self.clock, self.algorithms, lambda configuration: self.slowdown(configuration))

        def run_torch(problem: ConvProblem, operands: Operands) -> object:
            machine.run_torch(problem, operands)
            workspace = torch.empty(self.torch_bytes, dtype=torch.uint8)
            return torch.empty_like(operands.y), workspace

        return replace(machine, run_torch=run_torch)

    def compare(self, *limits: int, problems: Sequence[ConvProblem] = (FORWARD,), **how: Any) -> list[LimitsComparison]:
        return [
            *compare_under_limits(table(*problems), CONFIG, limits, machine=self.machine, database=self.database, **how)
        ]

    def under(self, *limits: int) -> list[UnderLimit]:
        (problem,) = self.compare(*limits)[-1].problems
        return list(problem.under)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def parts(run: Run | None) -> Sequence[MicroConfig] | None:
    return None if run is None else list(run.configuration.micro_configs)


def test_the_rival_is_undivided_and_ours_is_divided_where_that_is_faster(bench: Bench) -> None:
    under = bench.under(200)[0]
    assert under.limit_bytes == 200
    assert parts(under.rival) == [MicroConfig("small", 8)]
    assert parts(under.ours) == [MicroConfig("quick", 2)] * 4
    assert under.gain == pytest.approx((8 * 15 + 1) / (8 * 10 + 4))


def test_limits_are_inclusive_and_none_comes_last(bench: Bench) -> None:
    under = bench.under(800, 799, 800)
    assert [one.limit_bytes for one in under] == [799, 800, None]
    names = [one.rival.configuration.algorithms for one in under if one.rival is not None]
    assert names == [("small",), ("quick",), ("quick",)]
    assert under[1].gain == 1.0  # the same call, which is run once


def test_where_nothing_is_within_the_limit_there_is_no_gain(bench: Bench) -> None:
    nothing, pieces, _ = bench.under(9, 79)
    assert (nothing.rival, nothing.ours, nothing.gain) == (None, None, None)
    assert pieces.rival is None
    assert parts(pieces.ours) == [MicroConfig("small", 4)] * 2
    assert pieces.gain is None


def test_whole_runs_choose_the_rival(bench: Bench) -> None:
    """Alone ``quick`` is the faster one; as a whole run it is not."""
    bench.slowdown = lambda c: 3.0 if c.algorithms == ("quick",) else 1.0
    assert parts(bench.under(800)[0].rival) == [MicroConfig("small", 8)]


def test_a_rival_that_a_divided_one_has_kept_from_being_measured_is_measured(bench: Bench) -> None:
    """``quick`` has no undivided form, and is so much better in pieces that larger ones of ``late`` are not tried."""
    bench.quick.unsupported_sizes, bench.small.unsupported = (8,), "not here"
    late = FakeAlgorithm("late", bench.clock, linear(0.05), scratch_bytes_per_sample=200)
    bench.quick.scratch_bytes_per_sample = 1
    machine = fake_machine(bench.clock, [bench.native, bench.quick, late])
    (known,) = compare_under_limits(table(FORWARD), CONFIG, [1600], machine=machine, database=bench.database)
    assert parts(known.problems[0].under[0].rival) == [MicroConfig("late", 8)]


def test_a_second_comparison_measures_nothing(bench: Bench) -> None:
    bench.compare(200, problems=[FORWARD, OTHER])
    steps = [len(algorithm.sizes_run) for algorithm in bench.algorithms]
    bench.compare(100, 300, problems=[FORWARD, OTHER])
    assert [len(algorithm.sizes_run) for algorithm in bench.algorithms] == steps


def test_each_whole_run_is_made_once_however_many_limits_it_serves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.compare(800)  # then the tuner has nothing to do
    compared: list[int] = []
    timed: list[int] = []
    compare, time_in_turns = Machine.compare, limits_contest.time_in_turns

    def counted_compare(*args: Any, **how: Any) -> Any:
        compared.append(len(args[3]))
        return compare(*args, **how)

    def counted_turns(turns: Sequence[Contestant], *rest: Any) -> Any:
        timed.append(len(turns))
        return time_in_turns(turns, *rest)

    monkeypatch.setattr(Machine, "compare", counted_compare)
    monkeypatch.setattr(limits_contest, "time_in_turns", counted_turns)
    bench.compare(800, 900, 1000, 2000)
    assert len(compared) == 1
    assert timed[0] == 2  # torch, and quick, which is the rival as well as ours


# Torch as the reference


@contextmanager
def with_benchmark_mode(bench: Bench, step_s: Callable[[int], float]) -> Iterator[Mapping[str, Runner]]:
    """Torch's benchmark mode finds an engine with other costs."""

    def benchmarked(function: Callable[[], Any], /) -> Any:
        before, bench.native.step_s = bench.native.step_s, step_s
        try:
            return function()
        finally:
            bench.native.step_s = before

    yield {"torch": here, "torch-benchmark-10": benchmarked}


def compared_with_benchmark_mode(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step_s: Callable[[int], float]
) -> LimitsComparison:
    monkeypatch.setattr(limits_benchmark, "torch_variants", lambda device: with_benchmark_mode(bench, step_s))
    return bench.compare(200)[-1]


def test_the_reference_is_torch_in_benchmark_mode(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    known = compared_with_benchmark_mode(bench, monkeypatch, linear(0.012))
    assert known.reference == "torch-benchmark-10"
    (problem,) = known.problems
    assert problem.torch["torch"].time_s == pytest.approx(0.161)
    assert problem.torch["torch-benchmark-10"].time_s == pytest.approx(0.096)
    assert known.speedups == [pytest.approx(0.096 / 0.081)]


@pytest.mark.parametrize(
    ("per_sample_s", "size", "count"),
    [(0.012, 1, 8), (0.0103, 2, 4), (0.00998, 8, 1)],  # with 2 % more: 97.9, 84.1 and 81.4 ms
)
def test_as_fast_with_the_least_workspace(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, per_sample_s: float, size: int, count: int
) -> None:
    """``quick`` takes 88, 84, 82 and 81 ms with micro-batches of 1, 2, 4 and 8."""
    bench.torch_bytes = 5 << 20
    same = compared_with_benchmark_mode(bench, monkeypatch, linear(per_sample_s)).problems[0].same_time
    assert parts(same.ours) == [MicroConfig("quick", size)] * count
    assert same.theirs_bytes == 5 << 20  # without the result
    assert same.ratio == 5.0


def test_as_fast_counts_what_has_run_not_what_was_predicted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.slowdown = lambda c: 2.0 if c.micro_configs[0].micro_batch_size < 4 else 1.0
    same = compared_with_benchmark_mode(bench, monkeypatch, linear(0.012)).problems[0].same_time
    assert parts(same.ours) == [MicroConfig("quick", 4)] * 2


def test_nothing_may_be_as_fast(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    known = compared_with_benchmark_mode(bench, monkeypatch, linear(0.005))
    assert known.problems[0].same_time.ours is None
    assert known.workspace_ratios == []
    assert known.speedups == [pytest.approx(40 / 81)]


def test_torchs_own_counts_with_what_it_takes_as_a_call(bench: Bench) -> None:
    """As an algorithm it declares its result, too. Nothing else is as fast here."""
    bench.quick.unsupported = bench.small.unsupported = "not here"
    bench.torch_bytes = 300
    (problem,) = bench.compare()[-1].problems
    assert problem.same_time.ours is not None
    assert problem.same_time.ours.configuration.is_baseline
    assert problem.same_time.ours.workspace_bytes == problem.same_time.theirs_bytes == 300


# The whole table


def test_what_is_known_is_told_after_every_problem(bench: Bench) -> None:
    told = bench.compare(200, problems=[FORWARD, OTHER])
    assert [[p.task.problem for p in known.problems] for known in told] == [[FORWARD], [FORWARD, OTHER]]
    assert [known.is_complete for known in told] == [False, True]


@pytest.mark.parametrize(("problems_long", "done"), [(0.001, 1), (1.5, 1), (2.5, 2), (1000, 3)])
def test_no_problem_is_begun_that_would_not_be_done_in_time(bench: Bench, problems_long: float, done: int) -> None:
    """The first one in any case."""
    problems = [FORWARD, OTHER, replace(FORWARD, k=4)]
    other = Bench()
    other.compare(200, problems=problems[:1])
    known = bench.compare(200, problems=problems, seconds=problems_long * other.clock.now())[-1]
    assert (len(known.problems), known.wanted) == (done, 3)


def test_a_problem_that_cannot_be_run_is_passed_over_with_its_reason(bench: Bench) -> None:
    machine = bench.machine

    def run_torch(problem: ConvProblem, operands: Operands) -> object:
        if problem == FORWARD:
            raise RuntimeError("CUDA out of memory\nand a stack trace")
        return machine.run_torch(problem, operands)

    failing = replace(machine, run_torch=run_torch)
    *_, known = compare_under_limits(table(FORWARD, OTHER), CONFIG, [200], machine=failing, database=bench.database)
    assert [(f.task.problem, f.reason) for f in known.failed] == [(FORWARD, "CUDA out of memory")]
    assert [p.task.problem for p in known.problems] == [OTHER]


def test_an_interruption_comes_through(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    both = table(FORWARD, OTHER)
    told = compare_under_limits(both, CONFIG, [200], machine=bench.machine, database=bench.database)
    next(told)
    monkeypatch.setattr(Machine, "compare", interrupted)
    with pytest.raises(TuningInterrupted):
        next(told)


def test_progress_goes_on_to_the_end(bench: Bench) -> None:
    fractions: list[float] = []
    bench.compare(200, problems=[FORWARD, OTHER], progress=lambda text, fraction: fractions.append(fraction))
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] < 0.5 < fractions[-1] <= 1


# cuDNN's engines as rivals


def test_a_comparison_with_engines(bench: Bench) -> None:
    """The rival runs the engine itself, ours with what a call of mucudnn's costs more. Torch is no rival."""
    backend = FakeBackend()
    costs_s = {PICKY: 0.005, STEADY: 0.01, RANDOM: 0.03}
    backend.started = lambda plan: bench.clock.advance(0.001 + costs_s[plan.config] * plan.micro_batch_size)
    machine = bench.machine

    def run(problem: ConvProblem, configuration: Configuration, operands: Operands, **_: bool) -> None:
        bench.clock.advance(configuration.time_s + 0.002)

    ours = made_ready(run)
    machine = replace(machine, algorithms=[bench.native], whole_run=ours, sources=[CudnnEngines(backend)])
    (known,) = compare_under_limits(table(FORWARD), CONFIG, [33 * 8, 66 * 8], machine=machine, database=bench.database)
    tight, wide, _ = known.problems[0].under
    assert known.rivals == "cuDNN's engines"
    assert parts(tight.rival) == [MicroConfig(STEADY.name, 8)]
    assert tight.rival is not None
    assert tight.rival.time_s == pytest.approx(0.081)
    assert parts(tight.ours) == [MicroConfig(PICKY.name, 4)] * 2
    assert tight.gain == pytest.approx(0.081 / 0.044)
    assert parts(wide.rival) == [MicroConfig(PICKY.name, 8)]
    assert wide.rival is not None
    assert wide.rival.time_s == pytest.approx(0.041)
