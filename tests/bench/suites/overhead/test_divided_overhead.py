"""The benchmark of what a divided call costs, with a clock that counts calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.clock.machine import FakeClock

from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.suites.overhead import divided as divided_overhead
from mucudnn.bench.suites.overhead.divided import COPIES, MICRO_BATCHES, benchmark_divided, main, overheads_s
from mucudnn.kernels.torch_ops.gemm import GEMM
from mucudnn.measuring.timing.cuda_clock import wall_clock
from mucudnn.words.problem import Operation

STEP_S, OTHER_S = 3.0, 0.5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A step takes three seconds, opening and closing half a second each."""
    clock = FakeClock()

    def costing(name: str, seconds: float) -> None:
        original: Callable[..., None] = getattr(type(GEMM), name)

        def timed(*given: Any) -> None:
            original(*given)
            clock.seconds += seconds

        monkeypatch.setattr(type(GEMM), name, timed)

    costing("step", STEP_S)
    costing("open", OTHER_S)
    costing("close", OTHER_S)
    monkeypatch.setattr(divided_overhead, "MICRO_BATCH_SIZES", {"cpu": {"small": 1, "large": 2}})
    return clock


def test_the_overhead_is_what_a_call_has_beyond_its_steps(clock: FakeClock, tmp_path: Path) -> None:
    benchmark_divided(tmp_path, "cpu", rounds=2, clock=clock)
    overheads = list(overheads_s(read_folder(tmp_path)))
    columns = ("size", "operation", "micro_batch_size", "in_graph")
    assert [tuple(of[name] for name in columns) for of, *_ in overheads] == [
        (size, operation, n, False) for size, n in (("small", 1), ("large", 2)) for operation in Operation
    ]
    for _, overhead_s, step_s in overheads:
        assert (overhead_s, step_s) == (2 * OTHER_S / MICRO_BATCHES, STEP_S)


def test_wall_time_is_read_when_the_device_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    assert wall_clock("cuda").time(lambda: log.append("call"), 2) >= 0
    assert log == ["wait", "call", "call", "wait"]
    assert wall_clock("cpu").time(lambda: log.append("call"), 1) >= 0
    assert log[4:] == ["call"]


def test_times_in_graphs_are_those_of_one_copy(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_overhead, "_captured", lambda work: lambda: [work() for _ in range(COPIES)])
    problem = divided_overhead._GEOMETRY
    call_s, steps_s = divided_overhead._samples(problem, GEMM, 1, "cpu", True, 2, clock)
    assert call_s == [MICRO_BATCHES * STEP_S + 2 * OTHER_S] * 2
    assert steps_s == [MICRO_BATCHES * STEP_S] * 2


def test_the_command_writes_what_it_prints_and_measures_nothing_again(
    clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--rounds", "2", "--out", str(tmp_path / "folder"), "--json", str(tmp_path / "overhead.json")]
    first = CliRunner().invoke(main, asked)
    assert first.exit_code == 0, first.output
    assert len(first.stdout.splitlines()) == 6
    assert "small forward, gemm, 8 x 1, called from Python:" in first.output
    record = json.loads((tmp_path / "overhead.json").read_text())
    assert record["settings"]["micro_batches"] == MICRO_BATCHES
    monkeypatch.setattr(divided_overhead, "_samples", None)
    assert CliRunner().invoke(main, asked).stdout == first.stdout
    rows = read_folder(tmp_path / "folder").rows
    assert list(rows["contestant"]) == ["steps alone", "divided call"] * 6
    assert {len(samples) for samples in rows["samples_s"]} == {2}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(main, ["--device", "cuda"])
    assert result.exit_code == 2
    assert result.output.startswith("Error: device is 'cuda', but torch")
    assert len(result.output.splitlines()) == 1
