"""Inputs of many lengths, and geometries that are called once: who calls what, failures, and what is told of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_line import fail, invoke
from support.snapshots import assert_as_stored
from torch import nn
from torch.nn import functional as F

import mucudnn
from mucudnn.bench.results.reading import Header, ResultFolder, read_folder
from mucudnn.bench.results.variants import LengthRuntime
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.bench.sources import models
from mucudnn.bench.suites import lengths
from mucudnn.bench.suites.lengths import (
    Calls,
    compare_lengths,
    geometries,
    lengths_tables,
    prepare_geometries,
    prepare_lengths,
    random_lengths,
)
from mucudnn.bench.suites.shared.apart import Ready
from mucudnn.bench.suites.shared.runtimes import require_installed
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.running.devices import current_environment

LENGTHS = [*range(8, 32)]
X = torch.linspace(-1, 1, 2 * 3 * 32).reshape(2, 3, 32)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose1d(4, 2, 4, stride=2)).eval()


def made_up(
    runtime: LengthRuntime, subject: Any, given: list[int], tuned: int, threads: int, config: Config, *, log: Path
) -> Ready[int]:
    """A runtime that notes the lengths of its calls, of which the last process is killed in its second turn."""

    def call(length: int) -> list[Any]:
        with log.open("a") as file:
            file.write(f"{runtime} {length}\n")
        if runtime is LengthRuntime.OPENVINO and length > 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return [np.array([3.0, 4.5 if runtime is LengthRuntime.ONNX_RUNTIME else 4.0])]

    at = given[-tuned:] if runtime is LengthRuntime.MUCUDNN_EACH else given
    return Ready(lambda: None, 0, ask=Calls(call, (length if length in at else None for length in given)).take)


def compared(out: Path, *runtimes: LengthRuntime) -> ResultFolder:
    compare_lengths(tiny(), X, LENGTHS, Config(), out, name="tiny", tuned=3, runtimes=runtimes)
    return read_folder(out)


@pytest.mark.usefixtures("forked")
def test_all_get_the_same_lengths_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is killed, and the others go on; the next run measures nothing."""
    log = tmp_path / "log"
    monkeypatch.setattr(lengths, "prepare_lengths", partial(made_up, log=log))
    asked = LengthRuntime.ONNX_RUNTIME, LengthRuntime.OPENVINO, LengthRuntime.MUCUDNN_EACH
    folder = compared(tmp_path / "folder", *asked)
    rows = {line["contestant"]: line for line in folder.lines}
    assert [*rows] == [LengthRuntime.TORCH, *asked]
    assert rows["openvino"]["failure"] == "killed by SIGKILL"
    assert rows["torch"]["at"] == rows["onnxruntime"]["at"] == [*range(24)]
    assert rows["mucudnn-each"]["at"] == [21, 22, 23]
    assert (rows["torch"]["relative_difference"], rows["onnxruntime"]["relative_difference"]) == (0.0, 0.1)
    called = [line.split() for line in log.read_text().splitlines()]
    for name, expected in (("torch", LENGTHS), ("onnxruntime", LENGTHS), ("mucudnn-each", LENGTHS[-3:])):
        assert [int(length) for runtime, length in called if runtime == name] == expected
    changes = sum(before[0] != after[0] for before, after in pairwise(called))
    assert changes > len(LENGTHS) / 2
    assert compared(tmp_path / "folder", *asked).lines == folder.lines
    assert len(log.read_text().splitlines()) == len(called)


def test_random_lengths_are_the_same_in_every_run_and_within_their_range() -> None:
    found = random_lengths(200, 100)
    assert found == random_lengths(200, 100)
    assert (min(found), max(found)) == (50, 100)
    assert set(random_lengths(50, 7, least=7)) == {7}
    with pytest.raises(InvalidInputError, match="the least length is 8"):
        random_lengths(50, 7, least=8)
    with pytest.raises(InvalidInputError, match="give at least 30"):
        compare_lengths(tiny(), X, LENGTHS, Config(), Path("unused"))


def installed(runtime: LengthRuntime) -> bool:
    try:
        require_installed(runtime)
    except UnavailableError:
        return False
    return True


@pytest.fixture
def settings_kept() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
    mucudnn.disable()


@pytest.mark.usefixtures("settings_kept")
@pytest.mark.filterwarnings("ignore")  # of exporters
def test_each_runtime_computes_what_the_model_does(tmp_path: Path) -> None:
    model = tiny()
    config = Config(time_limit="10ms", database=tmp_path / "db.sqlite")
    expected = [model(X[..., :length]).detach().numpy() for length in LENGTHS]
    runtimes = [runtime for runtime in LengthRuntime if not runtime.is_compiled and installed(runtime)]
    assert LengthRuntime.MUCUDNN in runtimes
    for runtime in runtimes:
        ready = prepare_lengths(runtime, lambda: (model, X), LENGTHS, 2, 1, config)
        assert ready.ask is not None
        for at, exact in enumerate(expected):
            taken = ready.ask(1)
            if runtime is LengthRuntime.MUCUDNN_EACH and at not in (21, 23):
                assert taken["samples_s"] == [None]
            else:
                np.testing.assert_allclose(taken["outputs"][0], exact, rtol=1e-4, atol=1e-5)
        mucudnn.disable()


@pytest.mark.usefixtures("settings_kept")
def test_geometries_are_many_and_all_can_be_computed(tmp_path: Path) -> None:
    seen = {(x.shape, w.shape, *options.items()) for x, w, options in geometries()}
    assert len(seen) == 9504
    config = Config(database=tmp_path / "db.sqlite")
    for runtime in (LengthRuntime.TORCH, LengthRuntime.MUCUDNN):
        ready = prepare_geometries(runtime, 1, config)
        assert ready.ask is not None
        taken = ready.ask(500)
        x, w, options = next(given for index, given in enumerate(geometries()) if index == 499)
        np.testing.assert_allclose(taken["outputs"][0], F.conv_transpose2d(x, w, **options).numpy(), rtol=1e-5)  # type: ignore[arg-type]
        assert (taken["tuned"], len(taken["samples_s"])) == (0, 500)


def row(runtime: LengthRuntime, time_s: float, at: range = range(24), **more: Any) -> Row:
    columns = {"version": "1.0", "at": [*at], "grown_bytes": 2**24, "later_grown_bytes": 2**20, "tuned": 0}
    columns |= {"relative_difference": 0.0, "spent_s": 0.0, "ready_after_s": 1.5, **more}
    samples_s = [10 * time_s if index == 0 else time_s for index in at]
    return Row({"network": "tiny"}, runtime, samples_s, more=columns)


def test_the_table_tells_totals_ratios_growth_and_failures(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    settings = {"input_shape": [2, 3, 31], "lengths": 24, "least": 8, "most": 31}
    header = Header("lengths", "tiny", settings, current_environment(), ("network",), wanted=1)
    missing = "openvino not installed: pip install openvino"
    with open_folder(tmp_path, header) as folder:
        folder.add(
            [
                row(LengthRuntime.TORCH, 0.02),
                row(LengthRuntime.TORCH_COMPILE, 0.001, relative_difference=0.5),
                Row({"network": "tiny"}, LengthRuntime.OPENVINO, failure=missing, more={"version": ""}),
                row(LengthRuntime.MUCUDNN, 0.011, tuned=7, spent_s=2.25),
                row(LengthRuntime.MUCUDNN_EACH, 0.01, range(21, 24)),
            ]
        )
        folder.write_summary()
    (table,) = lengths_tables(read_folder(tmp_path))
    assert_as_stored("bench-lengths", table)


@pytest.mark.usefixtures("forked")
def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "load_model", lambda source, **_: (tiny(), (3, 64)))
    monkeypatch.setattr(lengths, "prepare_lengths", partial(made_up, log=tmp_path / "log"))
    asked = ("bench", "lengths", "tiny", "--lengths", "25", "--tuned", "2", "--runtimes", "mucudnn", "--batch", "2")
    result = invoke(*asked, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    folder = read_folder(tmp_path / "out")
    assert [line["contestant"] for line in folder.lines] == [LengthRuntime.TORCH, LengthRuntime.MUCUDNN]
    assert folder.header.settings["input_shape"] == [2, 3, 64]
    few: Callable[..., Any] = lambda: iter([*geometries()][:30])  # noqa: E731
    monkeypatch.setattr(lengths, "geometries", few)
    result = invoke("bench", "lengths", "--once")
    assert result.exit_code == 0, result.output
    assert "30 geometries, each called once" in result.output
    for wrong in (("bench", "lengths"), ("bench", "lengths", "tiny", "--once")):
        assert "give either SOURCE or --once" in fail(*wrong)
