"""Faults while tuning: which end it, which do not, and what the next tuning knows of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, fake_machine, linear, made_ready
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench
from support.races import CLOCK

from mucudnn.core.config import Config
from mucudnn.core.errors import BrokenDeviceError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Failure, FailureKind, Measurement, MicroConfig, Task
from mucudnn.measuring.candidates import find_candidates
from mucudnn.measuring.clocks import Clock
from mucudnn.measuring.whole_runs import Machine
from mucudnn.store.database import Database
from mucudnn.tuning.job import Job
from mucudnn.tuning.tuner import TuningInterrupted, tune


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_failures_for_lack_of_memory_are_told_but_another_run_tries_again(bench: Bench) -> None:
    bench.quick.prepared_bytes = 2**60
    (failure,) = {
        f.micro_config: f for f in bench.tune()[FORWARD].failures if f.micro_config.micro_batch_size == 1
    }.values()
    assert "available" in failure.reason
    assert not bench.database.failures(ENVIRONMENT, FORWARD, {"quick": 1})
    bench.quick.prepared_bytes = 0
    assert bench.tune()[FORWARD].configuration.algorithms == ("quick",)


def test_what_failed_is_tried_again_where_nothing_else_fits_but_for_barred_code_and_what_is_of_another_task() -> None:
    algorithms = FakeAlgorithm("quick", CLOCK, linear(0.01)), FakeAlgorithm("library:7", CLOCK, linear(0.01))
    candidates, _ = find_candidates(FORWARD, algorithms, [4, 8])
    names = [("quick", 8), ("library:7", 8), ("library:7", 2)]
    failures = [Failure(MicroConfig(*name), "it is wrong") for name in names]
    failures.append(replace(failures[1], micro_config=MicroConfig("library:7", 4), kind=FailureKind.OUT_OF_MEMORY))
    results: dict[MicroConfig, Measurement | Failure] = {failure.micro_config: failure for failure in failures}
    Job(Task(FORWARD, 8), 0.0, candidates, (), results).forget_failures()
    assert [*results] == [MicroConfig("library:7", 8), MicroConfig("library:7", 2)]


class Hungry(FakeAlgorithm):
    """Counting what it allocates inside takes more memory than there is."""

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        raise MemoryError("out of memory")


@pytest.mark.parametrize("config", [Config(), Config(workspace_budget="1MiB")])
def test_bytes_that_cannot_be_counted_end_no_tuning(bench: Bench, config: Config) -> None:
    hungry = Hungry("hungry", bench.clock, linear(0.001))
    machine = fake_machine(bench.clock, [bench.native, bench.quick, hungry])
    (tuned,) = tune([FORWARD], BATCH, config, database=bench.database, machine=machine).problems
    assert tuned.configuration.algorithms == ("quick",)


def refuse(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_without_memory_for_a_whole_run_of_torchs_own_the_prediction_is_used(bench: Bench) -> None:
    machine = replace(bench.machine, run_torch=refuse)
    (tuned,) = tune([FORWARD], BATCH, NO_LIMIT, database=bench.database, machine=machine).problems
    assert tuned.configuration.algorithms == ("quick",)
    assert "by prediction, not run" in tuned.reason


def test_without_memory_for_a_whole_run_of_ours_torchs_own_is_used(bench: Bench) -> None:
    machine = replace(bench.machine, whole_run=made_ready(refuse))
    (tuned,) = tune([FORWARD], BATCH, NO_LIMIT, database=bench.database, machine=machine).problems
    assert tuned.configuration.is_baseline
    assert "failed in a whole run: CUDA out of memory" in tuned.reason
    bench.native.scratch_bytes_per_sample = 1000
    with pytest.raises(torch.OutOfMemoryError):  # torch's own is over the limit
        tune([FORWARD], BATCH, Config(workspace_limit=200), database=Database(":memory:"), machine=machine)


def foreign(bench: Bench, **settings: object) -> tuple[FakeAlgorithm, Machine]:
    """An algorithm as a source offers it, on a machine that has torch's own beside it."""
    offered = FakeAlgorithm("cudnn:7", bench.clock, linear(0.01), version=91900, **settings)  # type: ignore[arg-type]
    return offered, fake_machine(bench.clock, [bench.native, offered])


def stored_failures(bench: Bench) -> tuple[Failure, ...]:
    return bench.database.failures(ENVIRONMENT, FORWARD, {"cudnn:7": 91900})


def test_ctrl_c_is_no_failure(bench: Bench) -> None:
    class Interrupted(FakeAlgorithm):
        def step(self, *operands: object) -> None:  # type: ignore[override]
            raise KeyboardInterrupt

    machine = fake_machine(
        bench.clock, [bench.native, Interrupted("cudnn:7", bench.clock, linear(0.01), version=91900)]
    )
    with pytest.raises(TuningInterrupted):
        tune([FORWARD], BATCH, NO_LIMIT, database=bench.database, machine=machine)
    assert not stored_failures(bench)


def test_one_that_breaks_the_device_is_stored_and_left_out_by_the_next_run(bench: Bench) -> None:
    offered, machine = foreign(bench, failing_sizes=(4,))
    unbroken = bench.clock.now

    def now() -> float:
        if 4 in offered.sizes_run:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return unbroken()

    broken = replace(machine, clock=Delegating(now))
    with pytest.raises(BrokenDeviceError, match=r"cudnn:7 .* unspecified launch failure"):
        tune([FORWARD], BATCH, NO_LIMIT, database=bench.database, machine=broken)
    (failure,) = stored_failures(bench)
    assert failure.micro_config == MicroConfig("cudnn:7", 4)
    offered.sizes_run.clear()
    (tuned,) = tune([FORWARD], BATCH, NO_LIMIT, database=bench.database, machine=machine).problems  # a new process
    assert 4 not in offered.sizes_run
    assert tuned.configuration.algorithms == ("cudnn:7",)


@dataclass
class Delegating(Clock):
    tell: Callable[[], float]

    def now(self) -> float:
        return self.tell()


# Tuning needs no benchmark, no report and no command: it works where these cannot be imported.
