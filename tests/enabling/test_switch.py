"""``enable``, ``disable`` and ``tuned``: which config counts, errors, and the real workshop with its database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.registered import no_wrapper_left
from torch import nn
from torch.nn import functional as F

import mucudnn
from mucudnn.core import errors
from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Task
from mucudnn.enabling import switch
from mucudnn.enabling.status import Origin
from mucudnn.enabling.workshop import Workshop
from mucudnn.store import sqlite_file

QUICK: dict[str, Any] = {"time_limit": "5ms", "algorithms": "gemm"}


@pytest.fixture(autouse=True)
def torchs_own_before_and_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("mucudnn.enabling.session.PATIENCE", 0.0)  # tuned at the first call
    switch._sessions.clear()
    switch._state.last = None
    with no_wrapper_left():
        yield


def convolve(n: int = 2) -> None:
    F.conv2d(torch.zeros(n, 3, 5, 5), torch.zeros(4, 3, 3, 3))


def counts() -> list[int]:
    return [one.calls for one in mucudnn.status().problems]


def test_enabled_until_disabled_the_last_config_counts_and_an_old_one_knows_what_it_had() -> None:
    first, second = Config(**QUICK), Config(**QUICK, strict=True)
    convolve()
    try:
        mucudnn.enable(first)
        mucudnn.enable(Config(**QUICK))
        convolve()
        mucudnn.enable(second)
        convolve()
        convolve()
        assert counts() == [2]
        mucudnn.enable(first)
        convolve()
    finally:
        mucudnn.disable()
    convolve()
    assert counts() == [2]
    assert mucudnn.status().problems[0].decision.origin is Origin.MEASURED
    mucudnn.disable()  # twice is once


def test_configs_that_cannot_be_are_refused_and_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    for config, words in (
        (Config(workspace_budget="1MiB"), "a workspace_limit for each"),
        (Config(workspace_limit="headroom"), "mucudnn.optimize"),
        (Config(algorithms="no such"), "this machine has"),
    ):
        for begin in (mucudnn.enable, lambda config: mucudnn.tuned(config).__enter__()):
            with pytest.raises(mucudnn.InvalidInputError, match=words):
                begin(config)
    with pytest.raises(mucudnn.InvalidInputError, match="config is"):
        mucudnn.enable({"strict": True})  # type: ignore[arg-type]
    with monkeypatch.context() as old:
        old.delattr(torch.library, "get_kernel")
        with pytest.raises(mucudnn.UnavailableError, match="install torch"):
            mucudnn.enable(Config(**QUICK))
    convolve()
    assert counts() == []


def test_a_second_process_measures_nothing(tmp_path: Path) -> None:
    config = Config(**QUICK, database=tmp_path / "measurements.sqlite")
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6, requires_grad=True)
    origins = []
    for _ in range(2):
        with mucudnn.tuned(config):
            layer(x).sum().backward()
        origins.append({one.decision.origin for one in mucudnn.status().problems})
        configurations = [one.decision.configuration for one in mucudnn.status().problems]
        switch._sessions.clear()  # as a new process has none
    assert origins == [{Origin.MEASURED}, {Origin.DATABASE}]
    assert None not in configurations


def test_the_nearest_stored_size_of_a_layer_is_known_to_another_process(tmp_path: Path) -> None:
    config, device = Config(**QUICK, database=tmp_path / "measurements.sqlite"), torch.device("cpu")
    w = torch.randn(8, 8, 3)
    with mucudnn.tuned(config):
        for n, length in ((2, 30), (2, 60), (5, 60)):
            for _ in range(4):  # after that many calls the third size is tuned, too
                F.conv1d(torch.zeros(n, 8, length), w)
        F.conv1d(torch.zeros(2, 8, 45), w, padding=1)  # another layer
    workshop = Workshop(config)
    for length, expected in ((40, [(30, 2)]), (50, [(60, 2), (60, 5)]), (200, [])):
        task = Task(ConvProblem(Operation.FORWARD, 8, 1, length, 8, 1, 3), 2, config.workspace_limit_bytes)
        assert workshop.look_up(task, device) is None
        found = [(tuned.problem.w, tuned.batch_size) for tuned in workshop.look_up_nearest(task, device)]
        assert found == expected


def test_what_may_be_stored_is_told_by_the_size_of_filters(tmp_path: Path) -> None:
    config, device = Config(**QUICK, database=tmp_path / "measurements.sqlite"), torch.device("cpu")
    with mucudnn.tuned(config):
        convolve()  # filters of 4x3x3x3
    workshop = Workshop(config)
    assert workshop.may_know((9, 9, 9), device), "nothing was looked up yet"
    assert workshop.look_up(Task(ConvProblem(Operation.FORWARD, 2, 3, 3, 3, 1, 1), 1), device) is None
    shapes: tuple[tuple[int, ...], ...] = (4, 3, 3, 3), (4, 3, 3), (4, 3, 3, 5), (3, 3, 3, 3), ()
    assert [workshop.may_know(shape, device) for shape in shapes] == [True, True, False, False, False]


def test_without_write_access_what_is_tuned_lives_in_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors._said.clear()
    file = tmp_path / "measurements.sqlite"
    with mucudnn.tuned(Config(**QUICK, database=file)):
        convolve()
    monkeypatch.setattr(sqlite_file, "_can_be_written", lambda path: False)  # for root any file can
    before, config = file.read_bytes(), Config(**QUICK, database=file, strict=True)
    with pytest.warns(RuntimeWarning, match="cannot be written"), mucudnn.tuned(config):
        convolve()
    with mucudnn.tuned(config):
        for _ in range(2):
            F.conv2d(torch.zeros(2, 3, 7, 7), torch.zeros(5, 3, 3, 3))
    assert [one.decision.origin for one in mucudnn.status().problems] == [Origin.DATABASE, Origin.MEASURED]
    assert file.read_bytes() == before


def test_optimize_and_tune_measure_torchs_own_while_enabled(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 6, 6)
    config = Config(time_limit="5ms", algorithms="gemm", database=tmp_path / "measurements.sqlite")
    with mucudnn.tuned(Config(**QUICK)):
        mucudnn.optimize(model, x, config)
        assert counts() == []
        mucudnn.tune(mucudnn.ConvProblem("forward", 3, 6, 6, 4, 3, 3), 2, config)
        assert counts() == []
