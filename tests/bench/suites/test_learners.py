"""Throughput of learners whose steps take known times, and a real learner in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch

from mucudnn.bench.results.variants import Variant
from mucudnn.bench.suites import learners
from mucudnn.bench.suites.learners import BOTH, Learner, LearnersSetting, Throughput, knee, measure_learners
from mucudnn.bench.suites.shared.processes import Worker, WorkerError
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, UnavailableError

CPUS = [3, 5, 7, 9, 11]
SETTING = LearnersSetting(
    "support.models_by_name:trained",
    "cpu",
    (2, 8),
    Config(algorithms=("gemm",), time_limit="10ms", database="file"),
    {"input_shape": (3, 9, 9)},
)


@dataclass
class KnownLearner:
    """In the place of a worker: a learner whose steps take known times, half as long with mucudnn's convolutions.

    One on the CPU 9 begins half a second after the others.
    """

    make: Callable[..., Any]
    setting: LearnersSetting
    threads: int
    cpus: Sequence[int]
    gpu: int | None

    def __enter__(self) -> KnownLearner:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, local_batch: int, variant: Variant, steps: int) -> tuple[float, float]:
        began_s = 0.5 if 9 in self.cpus and self.threads == 1 else 0.0
        return began_s, began_s + steps * local_batch / self.threads / (2 if variant is Variant.MUCUDNN else 1) / 10

    def request(self, function: Callable[[Any], Any]) -> None:
        self.requested = function

    def answer(self) -> Any:
        if self.setting.source == "failing":
            raise WorkerError("killed by SIGKILL")
        return self.requested(self)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[KnownLearner]:
    """The learners that were started, on five CPUs with four threads."""
    made: list[KnownLearner] = []

    def start(*arguments: Any) -> KnownLearner:
        made.append(KnownLearner(*arguments))
        return made[-1]

    monkeypatch.setattr(learners, "Worker", start)
    monkeypatch.setattr(learners, "sleep", lambda _: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*CPUS})
    torch.set_num_threads(4)
    return made


def test_learners_share_threads_and_have_cpus_of_their_own(started: list[KnownLearner]) -> None:
    measure_learners(SETTING, (1, 3, 4), rounds=1)
    assert [(learner.threads, learner.cpus) for learner in started] == [
        (4, [3, 5, 7, 9]),
        *[(1, [cpu]) for cpu in (3, 5, 7)],
        *[(1, [cpu]) for cpu in (3, 5, 7, 9)],
    ]
    assert [str(learner.setting.config.database) for learner in started] == ["file", *[":memory:"] * 7]


def test_images_of_all_are_counted_until_the_slowest_has_ended(started: list[KnownLearner]) -> None:
    throughputs = measure_learners(SETTING, (1, 2, 4), rounds=2)
    assert [(one.local_batch, one.learners, one.threads) for one in throughputs[::2]] == [
        (n, count, 4 // count) for n in (2, 8) for count in (1, 2, 4)
    ]
    assert {one.noise for one in throughputs} == {0.0}
    for one in throughputs:
        step_s = one.local_batch / one.threads / (20 if one.convolutions is Variant.MUCUDNN else 10)
        late_s = 0.5 if one.learners == 4 else 0.0
        steps = max(1, round(0.5 / (step_s + late_s)))  # half a second of steps, as one step took
        expected = one.learners * one.local_batch * steps / (steps * step_s + late_s)
        assert one.images_per_s == pytest.approx(expected)
        assert one.gain == pytest.approx(expected / (40 * (2 if one.convolutions is Variant.MUCUDNN else 1)))


def test_the_knee_is_the_fewest_learners_that_are_nearly_the_fastest() -> None:
    for rates, expected in (((100.0, 105.0, 90.0), 1), ((100.0, 106.0, 111.0), 2), ((50.0, 60.0, 70.0), 4)):
        throughputs = [
            Throughput(count, 1, 8, variant, rate if variant is Variant.MUCUDNN else 1.0, 0.0, 1.0)
            for variant in BOTH
            for count, rate in zip((1, 2, 4), rates, strict=True)
        ]
        assert [knee(throughputs, 8, variant) for variant in BOTH] == [1, expected]


def test_too_many_learners_and_one_that_fails_are_told(started: list[KnownLearner]) -> None:
    with pytest.raises(InvalidInputError, match="5 learners need a thread and a CPU each, and there are 4"):
        measure_learners(SETTING, (1, 5))
    failing = LearnersSetting("failing", "cpu", (1,), Config(), {})
    with pytest.raises(UnavailableError, match="one of 2 learners failed: killed by SIGKILL"):
        measure_learners(failing, (2,))


def place(_: Learner) -> tuple[set[int], int]:
    return os.sched_getaffinity(0), torch.get_num_threads()


@pytest.mark.slow
def test_a_learner_runs_where_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCUDNN_DATABASE", str(tmp_path / "other"))
    cpu = max(os.sched_getaffinity(0))
    setting = LearnersSetting(
        SETTING.source, "cpu", (2,), Config(algorithms=("gemm",), time_limit="10ms", database=":memory:"), SETTING.sizes
    )
    with Worker(Learner, setting, 1, (cpu,), None) as worker:
        assert worker.ask(place) == ({cpu}, 1)
        for variant in BOTH:
            began_s, ended_s = worker.ask(methodcaller("run", 2, variant, 3))
            assert 0 < began_s < ended_s
    assert not [*tmp_path.iterdir()], "measurements under load are not stored"
