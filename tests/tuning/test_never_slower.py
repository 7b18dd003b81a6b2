"""Nothing that a whole run shows to be slower than torch is chosen while torch's own fits: whatever was measured."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from math import inf, isfinite

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, linear, made_ready
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench
from support.effort import how_many
from support.told_jobs import told_job
from torch import Tensor

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import (
    Comparison,
    Configuration,
    Failure,
    Measurement,
    MicroConfig,
    Task,
)
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.tuning.choose import LEAST_GAIN, choose
from mucudnn.tuning.divide import divide
from mucudnn.tuning.job import Job, Outcome
from mucudnn.tuning.replay import SelectedMeasurements, replay
from mucudnn.tuning.tuner import tune

SEEDS = range(how_many(60, 2000))


@dataclass
class World:
    """Measurements and whole runs of one task, drawn at random: torch's own may lack either, and its bytes."""

    random: random.Random
    limit: int | None
    task: Task = field(init=False)
    measurements: list[Measurement] = field(init=False)
    declared: int | None = field(init=False)
    runs: dict[tuple[MicroConfig, ...], Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.random.choice((1, 2, 3, 4))
        name = f"task {self.random.random()}"
        self.task = Task(FORWARD, n, self.limit, name=name, in_headroom=self.random.random() < 0.2)
        every = [self._measured("native", size) for size in range(1, n + 1)]
        for algorithm in ("a", "b"):
            every += [self._measured(algorithm, size) for size in range(1, n + 1) if self.random.random() < 0.7]
        self.is_measured = self.random.random() < 0.5
        own = MicroConfig(TORCHS_OWN, n)
        self.true_bytes = next(m.scratch_bytes for m in every if m.micro_config == own)
        self.measurements = [m for m in every if self.is_measured or m.micro_config != own]
        self.declared = None if self.is_measured or self.random.random() < 0.3 else self.true_bytes
        self.baseline_s = self.random.uniform(0.5, 2.0) * n

    def _measured(self, algorithm: str, size: int) -> Measurement:
        prepared = 0 if algorithm == TORCHS_OWN else self.random.choice((0, 5))
        scratch = self.random.choice((0, 3, 10, 30)) * (size if algorithm == TORCHS_OWN else 1)
        step_s = self.random.uniform(0.5, 2.0) * size
        return Measurement(MicroConfig(algorithm, size), self.random.choice((0.0, 0.1)), step_s, prepared, scratch, 0.0)

    def job(self) -> Job:
        """Return the job, whose whole runs are drawn when they are asked for."""
        job = told_job(self.task, self.measurements, self._run, self.declared)
        self.runs = job.outcomes
        return job

    def _run(self, configuration: Configuration) -> Outcome:
        kind = self.random.random()
        if kind < 0.15:
            return None
        if kind < 0.3 and not configuration.is_baseline:
            return RuntimeError("it crashed")
        ratio = 1.0 if configuration.is_baseline else self.random.choice((0.2, 0.9, 0.99, 1.01, 1.05, 1.5))
        return Comparison(self.baseline_s, self.baseline_s / ratio, self.random.choice((0.0, 0.02, 0.3, inf)))

    @property
    def baseline_bytes(self) -> int:
        """Workspace of torch's own, as far as it can be known."""
        if self.is_measured or self.declared is not None:
            return self.true_bytes
        return max((m.scratch_bytes for m in self.measurements if m.micro_config.algorithm == TORCHS_OWN), default=0)

    def fits(self, limit: int | None) -> bool:
        return self.task.in_headroom or limit is None or self.baseline_bytes <= limit

    def require_sound(self, choice: TunedProblem) -> None:
        """The numbers can be written and printed, and belong to the task."""
        assert choice.configuration.batch_size == self.task.batch_size
        assert isfinite(choice.time_s)
        assert isfinite(choice.configuration.time_s)
        assert choice.baseline_s is None or isfinite(choice.baseline_s)


def lead(run: Outcome) -> float:
    """The speedup beyond what the noise and the least gain ask for; inf where nothing was run."""
    if not isinstance(run, Comparison):
        return inf
    return run.baseline_s / run.time_s - 1 - max(run.noise, LEAST_GAIN)


@pytest.mark.fuzz
@pytest.mark.parametrize("limit", [None, 0, 12, 40])
def test_alone_what_runs_slower_is_not_chosen_while_torchs_own_fits(limit: int | None) -> None:
    slower = 0
    for seed in SEEDS:
        world = World(random.Random(seed), limit)
        try:
            choice = choose(world.job())
        except (InfeasibleError, RuntimeError):
            continue
        world.require_sound(choice)
        chosen = choice.configuration
        run = {**world.runs}.get(chosen.micro_configs)
        if not chosen.is_baseline:
            assert lead(run) > 0 or not world.fits(limit), f"seed {seed}"
            assert limit is None or chosen.workspace_bytes <= limit
        if "PyTorch's own needs" in choice.reason:
            slower += 1
            assert not world.fits(limit)
        if choice.reason.startswith("fastest in whole runs"):
            assert lead(run) > 0
    assert (slower > 0) is (limit is not None)  # it can happen, and only under a limit


@pytest.mark.fuzz
@pytest.mark.parametrize("budget", [None, 0, 20, 80])
def test_of_a_budget_what_runs_slower_is_not_chosen_where_torchs_own_would_fit_in_its_place(budget: int | None) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        worlds = {world.task: world for world in (World(draw, None) for _ in range(3))}

        try:
            choices, _ = divide([world.job() for world in worlds.values()], budget)
        except InfeasibleError:
            continue
        in_all = sum(choice.configuration.workspace_bytes for choice in choices.values())
        assert budget is None or in_all <= budget
        for task, choice in choices.items():
            worlds[task].require_sound(choice)
            run = {**worlds[task].runs}.get(choice.configuration.micro_configs)
            if isinstance(run, Comparison) and lead(run) < 0 and not choice.configuration.is_baseline:
                instead = in_all - choice.configuration.workspace_bytes + worlds[task].baseline_bytes
                assert instead > (inf if budget is None else budget), f"seed {seed}"
            if "PyTorch's own needs" in choice.reason:
                assert f"needs {worlds[task].baseline_bytes} B" in choice.reason


# What the tuner makes of torch's own where it was not measured

DECLARED = 50  # bytes that torch's own needs, a sample
FAILED = Failure(MicroConfig(TORCHS_OWN, BATCH), "it was called with text for its operation")


class NoMemoryToMeasure(FakeAlgorithm):
    """Torch's own: undivided it runs, but there is no memory to compare it with float64 between guard zones."""

    def step(self, problem: ConvProblem, x: Tensor, *rest: Tensor) -> None:  # type: ignore[override]
        if x.shape[0] == BATCH:
            raise MemoryError("not enough for guard zones")
        super().step(problem, x, *rest)  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Bench:
    """All that is not torch's own, undivided, takes five times as long."""
    made = Bench(slowdown=lambda configuration: 1.0 if configuration.is_baseline else 10.0)
    made.native.internal_bytes_per_sample = DECLARED
    return made


def test_a_stored_failure_of_torchs_own_is_not_believed_and_superseded(bench: Bench) -> None:
    bench.database.add_failure(ENVIRONMENT, FORWARD, 1, FAILED)
    tuned = bench.tune()[FORWARD]
    assert tuned.configuration.is_baseline
    assert MicroConfig(TORCHS_OWN, BATCH) in {m.micro_config for m in tuned.measurements}
    assert FAILED not in tuned.failures
    assert not bench.database.failures(ENVIRONMENT, FORWARD, {TORCHS_OWN: 1})
    steps = bench.steps
    assert bench.tune()[FORWARD].configuration.is_baseline
    assert bench.steps == steps


@pytest.mark.parametrize(
    ("limit", "is_own"), [(None, True), (DECLARED * BATCH, True), (DECLARED * BATCH - 1, False)], ids=str
)
def test_torchs_own_that_cannot_be_measured_is_run_whole(bench: Bench, limit: int | None, is_own: bool) -> None:
    """Its workspace is counted: so a limit holds to the byte."""
    bench.native = NoMemoryToMeasure("native", bench.clock, linear(0.02), internal_bytes_per_sample=DECLARED)
    tuned = bench.tune(config=Config(workspace_limit=limit))[FORWARD]
    assert tuned.configuration.is_baseline is is_own
    assert tuned.speedup is not None
    assert (tuned.speedup < 1) is not is_own
    if is_own:
        assert tuned.configuration.workspace_bytes == DECLARED * BATCH
        assert tuned.configuration.time_s == tuned.time_s == tuned.baseline_s == pytest.approx(0.16)
        assert "is not faster" in tuned.reason
    else:
        assert f"PyTorch's own needs {DECLARED * BATCH} B" in tuned.reason
    json.dumps(tuned.to_json(), allow_nan=False)


def test_where_nothing_else_fits_torchs_own_is_run_whole(bench: Bench) -> None:
    bench.native = NoMemoryToMeasure("native", bench.clock, linear(0.02))
    bench.native.unsupported_sizes = (1, 2, 4)
    tuned = bench.tune(config=Config(workspace_limit=0))[FORWARD]
    assert tuned.configuration.is_baseline
    assert tuned.time_s == pytest.approx(0.16)
    assert tuned.relative_error is None
    assert "not measured" in str(tuned)
    assert bench.tune(FORWARD, config=Config(workspace_budget=0))[FORWARD].configuration.is_baseline


def test_where_nothing_else_runs_whole_torchs_own_does(bench: Bench) -> None:
    def run(problem: ConvProblem, configuration: Configuration, operands: object, **_: object) -> None:
        if not configuration.is_baseline:
            raise RuntimeError("it crashed")
        bench.clock.advance(0.16)

    bench.native = NoMemoryToMeasure("native", bench.clock, linear(0.02))
    machine = replace(bench.machine, whole_run=made_ready(run))
    (tuned,) = tune([FORWARD], BATCH, NO_LIMIT, database=bench.database, machine=machine).problems
    assert tuned.configuration.is_baseline
    assert tuned.time_s == pytest.approx(0.16)
    assert "failed in a whole run: it crashed" in tuned.reason


# What is solved from a database in which torch's own failed


def replayed(task: Task, config: Config) -> TunedProblem:
    """Only micro-batches of torch's own were measured; every whole run was five times slower than torch."""
    measured = [Measurement(MicroConfig(TORCHS_OWN, n), 0.0, 0.001 * n, 0, 10 * n, 1e-7) for n in (1, 2)]
    every = (tuple(MicroConfig(TORCHS_OWN, n) for n in parts) for parts in ((2, 2), (2, 1, 1), (1, 1, 1, 1)))
    runs = dict.fromkeys(every, Comparison(0.1, 0.5, 0.01))
    stored = SelectedMeasurements(ENVIRONMENT, {TORCHS_OWN: 1}, {task: measured}, {task: runs})
    return replay([task], config, stored).problems[0]


@pytest.mark.parametrize(
    ("bounds", "is_own"),
    [
        ({"workspace_limit": None}, True),
        ({"workspace_limit": 20}, True),
        ({"workspace_limit": 19}, False),  # two samples alone need more, so all the more do four
        ({"workspace_budget": 20}, True),
        ({"workspace_budget": 19}, False),
    ],
    ids=str,
)
def test_what_stored_whole_runs_show_to_be_slower_is_no_answer(bounds: dict[str, int], is_own: bool) -> None:
    config = Config(**bounds)  # type: ignore[arg-type]
    limit = None if "workspace_budget" in bounds else config.workspace_limit_bytes
    tuned = replayed(Task(FORWARD, 4, limit), config)
    assert tuned.configuration.is_baseline is is_own
    assert tuned.baseline_s == 0.1
    assert tuned.time_s == (0.1 if is_own else 0.5)


def test_in_the_headroom_what_is_not_known_at_all_is_asked_for() -> None:
    config = Config(workspace_limit="headroom")
    with pytest.raises(InfeasibleError, match="measure it with mucudnn tune"):
        replayed(Task(FORWARD, 4, 0, in_headroom=True), config)
    assert replayed(Task(FORWARD, 4, 20, in_headroom=True), config).configuration.is_baseline


# Smaller batches than the tuned one


@pytest.mark.parametrize(("limit", "is_left_to_torch"), [(None, True), (300, True), (160, False)], ids=str)
def test_what_was_slower_in_a_smaller_batch_is_not_run_there(
    bench: Bench, limit: int | None, is_left_to_torch: bool
) -> None:
    """``quick`` was slower than torch with 4 samples, for which torch needs 200 bytes; with 8 it is faster."""
    config = Config(workspace_limit=limit)
    bench.slowdown = lambda configuration: 10.0
    tune([FORWARD], 4, config, database=bench.database, machine=bench.machine)
    bench.slowdown = lambda configuration: 1.0
    tuned = tune([FORWARD], BATCH, config, database=bench.database, machine=bench.machine)
    configurations = tuned.configurations(FORWARD)
    assert configurations[BATCH].algorithms == ("quick",)
    assert (4 not in configurations) is is_left_to_torch
    assert {1, 2, 3, 5, 6, 7, 8} <= set(configurations)
