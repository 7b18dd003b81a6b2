"""Several devices measure, each in its own process; the CPU stands for each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import mucudnn
from mucudnn.tuning import on_devices
from mucudnn.tuning.on_devices import _names, _parts
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.task import Task

pytestmark = pytest.mark.slow


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_devices, "_names", lambda config, device_type: [device_type, device_type])


def config(tmp_path: Path, **more: str) -> Config:
    return Config(algorithms=("gemm",), database=tmp_path / "measured.sqlite", devices="all", confirm=False, **more)


@pytest.mark.parametrize("bound", [{"workspace_limit": "1MiB"}, {"workspace_budget": "4MiB"}])
@pytest.mark.usefixtures("two_devices")
def test_optimize_measures_nothing_that_the_devices_have(
    bound: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mucudnn.measuring.quick_race.QuickRace._run", None)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3))
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    ours = mucudnn.optimize(model, x, config(tmp_path, **bound), progress=False)
    assert len(mucudnn.report(ours).to_frame()) == 5
    torch.testing.assert_close(ours(x), expected)


@pytest.mark.usefixtures("two_devices")
def test_what_a_process_does_not_measure_is_measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_devices, "_PROGRAM", "import sys; sys.exit('it is on fire')")
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)), torch.randn(2, 3, 8, 8)
    with pytest.warns(RuntimeWarning, match=r"measuring on cpu failed, .* measured here: it is on fire"):
        ours = mucudnn.optimize(model, x, config(tmp_path), progress=False)
    assert len(mucudnn.report(ours).to_frame()) == 5


def test_all_are_the_devices_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert [*_names(Config(devices="all"), "cuda")] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [*_names(Config(devices="all"), "cpu")] == ["cpu"]
    with pytest.raises(InvalidInputError, match="devices are cuda:0, cuda:1, and the convolutions are on cpu"):
        _names(Config(devices="cuda:0,cuda:1"), "cpu")


def test_tasks_of_a_problem_stay_together_and_all_are_dealt_out() -> None:
    problems = [ConvProblem(of, 3, 8, 8, 4, 3, 3, (1, 1), (0, 0), (1, 1), 1) for of in Operation]
    tasks = [Task(problem, n, 1000) for problem in problems for n in (2, 4)]
    parts = _parts(tasks, ["cuda:0", "cuda:1"], Config(devices="cuda:0,cuda:1"))
    assert [part.device for part in parts] == ["cuda:0", "cuda:1"]
    assert sorted(str(task) for part in parts for task in part.tasks) == sorted(map(str, tasks))
    first, second = ({task.problem for task in part.tasks} for part in parts)
    assert not first & second
    assert all(part.config.devices == () for part in parts)
