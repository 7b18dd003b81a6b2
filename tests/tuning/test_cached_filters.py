"""Cached filters are chosen as brute force would, with algorithms whose costs are known and a clock that they move."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, product
from typing import Any

import pytest
import torch
from support.clock.machine import FakeAlgorithm, FakeClock, fake_machine, linear, made_ready
from support.problems.measurements import measured
from torch import nn
from torch.nn import functional as F

import mucudnn
from mucudnn.database.database import Database
from mucudnn.kernels.compiled import library
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.measuring.operands import followed_operands, random_operands
from mucudnn.measuring.whole_runs import Machine, run_torch
from mucudnn.solver.reuse import solve_wr
from mucudnn.tuning import cached_filters as keeping
from mucudnn.tuning.cached_filters import FINGERPRINT_BYTES_PER_S, FINGERPRINT_S, cache_filters
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, Measurement, MicroConfig, WithCachedFilter, WithEpilogue

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled, so nothing is kept")
PROBLEM = ConvProblem(Operation.FORWARD, c=2, h=6, w=6, k=2, r=3, s=3, padding=(1, 1))
FINGERPRINT = FINGERPRINT_S + 2 * 2 * 9 * 4 / FINGERPRINT_BYTES_PER_S


def tuned_for(
    measurements: Sequence[Measurement], n: int = 1, limit: int | None = None, **changes: Any
) -> TunedProblem:
    """The result of tuning if whole runs confirm predictions."""
    chosen = solve_wr(measurements, n, limit)
    made = TunedProblem(PROBLEM, n, chosen, 1.0, 1.0, 1e-7, "", tuple(measurements), limit_bytes=limit)
    return replace(made, error_bound=Config().error_bound(PROBLEM.dtype), **changes)


def model_of(*tuned: TunedProblem | Sequence[TunedProblem]) -> nn.Sequential:
    modules = []
    for of_module in tuned:
        module = mucudnn.Conv2d(2, 2, 3, padding=1).eval()
        module.tuned = (of_module,) if isinstance(of_module, TunedProblem) else tuple(of_module)
        modules.append(module)
    return nn.Sequential(*modules)


@dataclass
class World:
    """A machine on which everything takes what the measurements say; what is kept is slower by ``slowdown``."""

    clock: FakeClock = field(default_factory=FakeClock)
    slowdown: Callable[[str], float] = lambda algorithm: 1.0
    kept_runs: list[tuple[Configuration, str]] = field(default_factory=list)

    @property
    def machine(self) -> Machine:
        algorithms = [FakeAlgorithm(name, self.clock, linear(1.0)) for name in ("native", "a", "b")]

        def run(problem: ConvProblem, configuration: Configuration, operands: object) -> None:
            self.clock.advance(configuration.time_s)

        return replace(fake_machine(self.clock, algorithms), whole_run=made_ready(run))

    def cached_run(self, problem: object, configuration: Configuration, algorithm: str, operands: object) -> Any:
        self.kept_runs.append((configuration, algorithm))
        return lambda: self.clock.advance(configuration.time_s * self.slowdown(algorithm))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(keeping, "cached_run", made.cached_run)
    return made


def kept_algorithms(model: nn.Sequential) -> list[str]:
    return [",".join(kept.algorithm for kept in module.cached_filters) for module in model]  # type: ignore[union-attr]


def keep(model: nn.Sequential, world: World, budget: int | str | None, **config: Any) -> list[str]:
    """The algorithm of every module whose filter is kept, "" where nothing is."""
    cache_filters(model, Config(cache_budget=budget, **config), machine=world.machine)
    return kept_algorithms(model)


TORCHS_OWN = measured("native", 1, 1.0)
A = measured(
    "a", 1, 0.5, setup_s=0.6, prepared_bytes=100
)  # with its setup slower than native, without it twice as fast
B = measured("b", 1, 0.7, setup_s=0.1, prepared_bytes=40)


def brute_force(tuned: Sequence[TunedProblem], budget: int) -> float:
    """Least sum of times over every choice of what to keep: by trying all configurations of all choices."""
    every = [list(_choices(one)) for one in tuned]
    totals = [sum(t for t, _ in chosen) for chosen in product(*every) if sum(b for _, b in chosen) <= budget]
    return min(totals)


def _choices(tuned: TunedProblem) -> Iterator[tuple[float, int]]:
    """(seconds, bytes kept): nothing, or one algorithm, if that is 3 % faster."""
    rows = {m.micro_config: m for m in tuned.measurements}
    covers = [
        cover
        for count in range(1, tuned.batch_size + 1)
        for cover in combinations_with_replacement(rows.values(), count)
        if sum(m.micro_config.micro_batch_size for m in cover) == tuned.batch_size
    ]

    def fastest(kept: str) -> float:
        return min((_time_s(cover, kept) for cover in covers if _fits(cover, kept, tuned.limit_bytes)), default=9e9)

    unkept = fastest("")
    yield unkept, 0
    for name, size in {m.micro_config.algorithm: m.prepared_bytes for m in rows.values() if m.prepared_bytes}.items():
        if unkept / fastest(name) - 0.03 > 1:
            yield fastest(name), size


def _algorithms_in(cover: Sequence[Measurement]) -> dict[str, Measurement]:
    return {m.micro_config.algorithm: m for m in cover}


def _time_s(cover: Sequence[Measurement], kept: str) -> float:
    setups = (FINGERPRINT if name == kept else m.setup_s for name, m in _algorithms_in(cover).items())
    return sum(setups) + sum(m.step_s for m in cover)


def _fits(cover: Sequence[Measurement], kept: str, limit: int | None) -> bool:
    prepared = sum(m.prepared_bytes for name, m in _algorithms_in(cover).items() if name != kept)
    return limit is None or prepared + max(m.scratch_bytes for m in cover) <= limit


@pytest.mark.parametrize("seed", range(60))
def test_the_division_is_that_of_brute_force(world: World, seed: int) -> None:
    generator = random.Random(seed)
    layers = []
    for _ in range(generator.randint(1, 4)):
        n = generator.choice((1, 2, 3))
        rows = [measured("native", n, generator.uniform(1, 2) * n)]
        for name in "ab":
            setup_s, prepared = generator.uniform(0, 2), generator.randint(1, 9)
            sizes = generator.sample(range(1, n + 1), generator.randint(1, n))
            costs = ((size, generator.uniform(0.2, 1.5) * size, generator.randint(0, 9)) for size in sizes)
            rows += [
                measured(name, size, step_s, scratch, setup_s=setup_s, prepared_bytes=prepared)
                for size, step_s, scratch in costs
            ]
        layers.append(tuned_for(rows, n, generator.choice((None, 4, 9))))
    budget = generator.randint(1, 20)
    division = cache_filters(model_of(*layers), Config(cache_budget=budget), machine=world.machine)
    assert division is not None
    assert division.objective_s == pytest.approx(brute_force(layers, budget), abs=1e-9)
    assert division.workspace_bytes <= budget


def test_a_filter_that_makes_another_algorithm_the_fastest_is_kept(world: World) -> None:
    model = model_of(tuned_for([TORCHS_OWN, A]))
    assert model[0].choices is None  # torch's own was chosen
    assert keep(model, world, None) == ["a"]
    (kept,) = model[0].cached_filters  # type: ignore[union-attr]
    assert kept.prepared_bytes == 100
    assert [(n, str(c)) for n, c in kept.configurations.items()] == [(1, "a 1")]
    assert "times as fast as not kept" in str(kept)


@pytest.mark.parametrize(("slowdown", "expected"), [(1.5, "a"), (1.56, "b"), (3.0, "b")])
def test_what_whole_runs_refute_is_dropped_and_the_rest_divided_again(
    world: World, slowdown: float, expected: str
) -> None:
    """a is predicted to take 0.5 s, and what keeps nothing takes 0.8 s: 1.56 times that is not faster by 3 %."""
    world.slowdown = {"a": slowdown, "b": 1.0}.__getitem__
    assert keep(model_of(tuned_for([TORCHS_OWN, A, B])), world, None) == [expected]


def test_what_fails_to_run_is_not_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(keeping, "cached_run", lambda *_: fail)
    assert keep(model_of(tuned_for([TORCHS_OWN, A])), world, None) == [""]


@pytest.mark.parametrize(("slowdown", "sizes"), [(1.0, [1, 2]), (3.0, [2])])
def test_what_was_once_slower_than_torch_in_a_smaller_batch_is_not_run_there(
    world: World, slowdown: float, sizes: list[int]
) -> None:
    rows = [TORCHS_OWN, A, measured("native", 2, 2.0), measured("a", 2, 1.0, setup_s=0.6, prepared_bytes=100)]
    small, large = model_of(tuned_for(rows[:2])), model_of(tuned_for(rows, 2))
    with Database(":memory:") as database:
        for model, factor in ((small, slowdown), (large, 1.0)):
            world.slowdown = {"a": factor}.__getitem__
            cache_filters(model, Config(cache_budget=None), machine=world.machine, database=database)
    (kept,) = large[0].cached_filters  # type: ignore[union-attr]
    assert sorted(kept.configurations) == sizes


def test_nothing_is_run_twice_and_replay_gives_the_same(world: World) -> None:
    layers = [tuned_for([TORCHS_OWN, A, B]), tuned_for([replace(TORCHS_OWN, step_s=3.0), A, B])]
    world.slowdown = {"a": 3.0, "b": 1.0}.__getitem__
    first = keep(model_of(*layers), world, 100)
    runs, now = len(world.kept_runs), world.clock.now()
    assert runs > 1
    assert keep(model_of(*layers), world, 100) == first
    assert keep(model_of(*layers[::-1]), world, 100) == first[::-1]
    assert world.clock.now() == now


def test_smaller_batches_run_with_what_is_kept_where_that_is_fastest(world: World) -> None:
    rows = [measured("native", n, 1.0 * n) for n in (1, 2, 4)]
    rows += [measured("a", n, step_s, setup_s=9.0, prepared_bytes=100) for n, step_s in ((1, 1.5), (2, 1.6), (4, 2.0))]
    model = model_of(tuned_for(rows, 4))
    assert keep(model, world, None) == ["a"]
    (kept,) = model[0].cached_filters  # type: ignore[union-attr]
    assert {n: str(c) for n, c in kept.configurations.items()} == {2: "a 2", 3: "a 2 + native 1", 4: "a 4"}


def test_batch_sizes_of_one_module_share_what_is_kept(world: World) -> None:
    rows = {
        n: [measured("native", n, 1.0 * n), measured("a", n, 0.5 * n, setup_s=0.6, prepared_bytes=100)] for n in (1, 4)
    }
    model = model_of([tuned_for(rows[1], 1), tuned_for(rows[4], 4)])
    assert keep(model, world, 100) == ["a"]
    (kept,) = model[0].cached_filters  # type: ignore[union-attr]
    assert sorted(kept.configurations) == [1, 4]
    assert {configuration.batch_size for configuration, _ in world.kept_runs} == {1, 4}
    too_little = cache_filters(model, Config(cache_budget=99), machine=world.machine)
    assert too_little is not None
    assert too_little.objective_s == pytest.approx(1.0 + 2.6)  # a call of either, nothing kept


def test_barred_algorithms_and_other_operations_are_left_out(world: World) -> None:
    inexact = tuned_for([TORCHS_OWN, replace(A, relative_error=1e-3)])
    backward = tuned_for([TORCHS_OWN, A], problem=PROBLEM.with_operation(Operation.BACKWARD_DATA))
    assert keep(model_of(inexact, backward), world, None) == ["", ""]
    assert world.kept_runs == []


def test_a_budget_of_zero_keeps_nothing_and_takes_back_what_was_kept(world: World) -> None:
    model = model_of(tuned_for([TORCHS_OWN, A]))
    assert keep(model, world, None) == ["a"]
    assert cache_filters(model, Config(), machine=world.machine) is None
    assert model[0].filter_cache is None
    assert cache_filters(nn.Linear(2, 2), Config(cache_budget=None), machine=world.machine) is None


def test_where_nothing_is_compiled_it_says_why_nothing_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tuned_for([TORCHS_OWN, A]))
    monkeypatch.setattr(library, "_path", lambda build: None)
    loaded_build.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no filters are kept: .* was not built"):
            assert cache_filters(model, Config(cache_budget=None), machine=world.machine) is None
    finally:
        loaded_build.cache_clear()
    assert kept_algorithms(model) == [""]


def test_what_follows_is_part_of_the_whole_runs_of_kept_filters(world: World) -> None:
    epilogue, torchs = WithEpilogue("ReLU6", adds=True), (MicroConfig("native", 1),)
    model = model_of(tuned_for([TORCHS_OWN, A], epilogue=epilogue))
    key = (world.machine.environment, PROBLEM, (A.micro_config,), {"a": 1, "native": 1})
    with Database(":memory:") as database:
        cache_filters(model, Config(cache_budget=None), machine=world.machine, database=database)
        assert database.whole_run(*key, WithCachedFilter("a", torchs, epilogue)) is not None
        assert database.whole_run(*key, WithCachedFilter("a", torchs)) is None
    assert kept_algorithms(model) == ["a"]


@pytest.mark.parametrize("algorithm", ["winograd-2x2", "fft"])
@pytest.mark.parametrize("epilogue", [None, WithEpilogue("ReLU6", adds=True)], ids=str)
def test_calls_with_a_kept_filter_have_what_follows(algorithm: str, epilogue: WithEpilogue | None) -> None:
    operands = followed_operands(PROBLEM, 3, epilogue)
    configuration = Configuration((MicroConfig(algorithm, 2), MicroConfig(algorithm, 1)), 1.0, 0)
    call = keeping.cached_run(PROBLEM, configuration, algorithm, operands)
    for _ in range(2):
        torch.testing.assert_close(call(), run_torch(PROBLEM, operands), rtol=1e-4, atol=1e-4)


def test_a_tuned_model_computes_the_same_with_and_without() -> None:
    """Runs on this machine, whatever is found to be worth caching."""
    rows = [measured("native", 2, 1.0), measured("winograd-4x4", 2, 0.1, setup_s=1.0, prepared_bytes=20_000)]
    model, x = model_of(tuned_for(rows, 2), tuned_for(rows, 2)), torch.randn(2, 2, 6, 6)
    with torch.no_grad():
        expected = x
        for module in model:
            expected = F.conv2d(expected, module.weight, module.bias, padding=1)  # type: ignore[arg-type]
        division = cache_filters(model, Config(cache_budget="1MiB"))
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert division is not None
    assert len(division.assignment) == 2


def test_the_run_that_is_timed_prepares_once(preparations: list[Any]) -> None:
    chosen = Configuration((MicroConfig("winograd-4x4", 2),), 1.0, 0)
    operands = random_operands(PROBLEM, 2)
    call = keeping.cached_run(PROBLEM, chosen, "winograd-4x4", operands)
    y = [call() for _ in range(3)][-1]
    torch.testing.assert_close(y, F.conv2d(operands.x, operands.w, padding=1), rtol=1e-4, atol=1e-5)
    assert len(preparations) == 1
