"""Runtimes in comparison: turns in processes of their own, failures, outputs, and what is told of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_line import fail, invoke
from support.snapshots import assert_as_stored
from torch import nn

from mucudnn.bench.results.reading import Header, ResultFolder, read_folder
from mucudnn.bench.results.variants import Runtime
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.bench.sources import models
from mucudnn.bench.suites import inference
from mucudnn.bench.suites.inference import compare_runtimes, inference_tables, prepare_runtime
from mucudnn.bench.suites.shared.apart import Ready
from mucudnn.bench.suites.shared.runtimes import relative_difference, require_installed
from mucudnn.core.config import Config
from mucudnn.core.errors import UnavailableError
from mucudnn.running.devices import current_environment


def made_up_runtime(
    runtime: str, subject: Any, threads: int, config: Any, *, outputs: Mapping[str, Any], log: Path
) -> Ready[Any]:
    """A runtime that gives these outputs, and notes its calls in a file beside the model's.

    outputs: of each runtime; those that have none kill their process when they are called.
    """

    def note(event: str) -> None:
        with log.open("a") as file:
            file.write(f"{runtime} {event} {os.getpid()} {threads}\n")

    note("ready")
    if runtime not in outputs:
        return Ready(partial(os.kill, os.getpid(), signal.SIGKILL), ([np.ones(2)], {}))
    return Ready(lambda: note("called"), ([np.array(outputs[runtime])], {}))


X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def tiny() -> nn.Sequential:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    return layers.eval()


def compared(out: Path, *runtimes: Runtime) -> ResultFolder:
    compare_runtimes(tiny(), X, Config(), out, name="tiny", rounds=2, runtimes=runtimes)
    return read_folder(out)


@pytest.mark.usefixtures("forked")
def test_runtimes_take_turns_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is killed in its first call, and the others go on; the next run measures nothing."""
    log = tmp_path / "log"
    job = partial(made_up_runtime, outputs={"torch": [3.0, 4.0], "openvino": [3.0, 4.5]}, log=log)
    monkeypatch.setattr(inference, "prepare_runtime", job)
    torch.set_num_threads(2)
    folder = compared(tmp_path / "folder", Runtime.OPENVINO, Runtime.ONNX_RUNTIME)
    torchs, killed, other = folder.lines
    assert [line["contestant"] for line in folder.lines] == [Runtime.TORCH, Runtime.ONNX_RUNTIME, Runtime.OPENVINO]
    assert (torchs["relative_difference"], other["relative_difference"]) == (0.0, pytest.approx(0.1))
    assert (killed["samples_s"], killed["failure"]) == ([], "killed by SIGKILL")
    assert len(torchs["samples_s"]) == len(other["samples_s"]) == 2
    (table,) = inference_tables(folder)
    assert "fastest other" not in str(table.caption)  # ours did not take part
    notes = [line.split() for line in log.read_text().splitlines()]
    assert [note[:2] for note in notes[:3]] == [[name, "ready"] for name in ("torch", "onnxruntime", "openvino")]
    assert {threads for *_, threads in notes} == {"2"}
    assert len({process for _, _, process, _ in notes}) == 3
    turns = [name for name, what, *_ in notes if what == "called"]
    changes = sum(before != after for before, after in pairwise(turns))
    assert changes in (2, 3)  # two rounds of two runtimes, each round in an order of its own
    monkeypatch.delattr(inference, "prepare_runtime")
    assert compared(tmp_path / "folder", Runtime.OPENVINO, Runtime.ONNX_RUNTIME).lines == folder.lines


@pytest.fixture
def settings_kept() -> Iterator[None]:
    import torch._inductor.config as inductor

    freezing = inductor.freezing
    yield
    torch.set_grad_enabled(True)
    inductor.freezing = freezing


def installed(runtime: Runtime) -> bool:
    try:
        require_installed(runtime)
    except UnavailableError:
        return False
    return True


@pytest.mark.parametrize("runtime", [*Runtime], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.filterwarnings("ignore")  # of exporters and compilers
def test_each_runtime_computes_what_the_model_does(
    runtime: Runtime, memory_format: torch.memory_format, settings_kept: None
) -> None:
    if not installed(runtime):
        pytest.skip(f"{runtime} is not installed")
    if runtime is Runtime.TORCH_COMPILE and memory_format is torch.channels_last:
        pytest.skip("it takes a minute, and is torch's own")
    model, x = tiny().to(memory_format=memory_format), X.contiguous(memory_format=memory_format)
    expected = model(x).detach().numpy()
    config = Config(time_limit="10ms", fuse=True, cache_budget="1MiB")
    ready = prepare_runtime(runtime, lambda: (model, x), 1, config)
    assert ready.result[1].get("peak_bytes", inf) >= expected.nbytes
    for outputs in (ready.result[0], ready.call()):
        assert relative_difference(outputs, [expected]) < 1e-5  # type: ignore[arg-type]


def row(
    runtime: Runtime, version: str, time_s: float, spread: float, difference: float, **kinds_s: float
) -> tuple[Runtime, tuple[float, ...], str | None, dict[str, Any]]:
    samples_s = (time_s * (1 - spread), time_s, time_s * (1 + spread))
    more = {
        "version": version,
        "relative_difference": difference,
        "ready_after_s": 1.5,
        "kinds_s": kinds_s,
        "grown_bytes": 2**20,
    }
    return runtime, samples_s, None, more


def made_up(out: Path, wrong_s: float = 0.05, **torch_kinds_s: float) -> ResultFolder:
    failure = "openvino not installed: pip install openvino"
    found = [
        row(Runtime.TORCH, "2.13", 0.06, 0.01, 0.0, **torch_kinds_s),
        row(Runtime.TORCH_COMPILE, "2.13", wrong_s, 0.0, 0.2),
        row(Runtime.ONNX_RUNTIME, "1.32", 0.04, 0.02, 2e-7),
        (Runtime.OPENVINO, (), failure, {"version": ""}),
        row(Runtime.MUCUDNN, "0.1.0", 0.03, 0.0, 3e-7),
        row(Runtime.MUCUDNN_COMPILE, "0.1.0", 0.025, 0.0, 3e-7, **({"3x3": 0.02} if torch_kinds_s else {})),
    ]
    torch.set_num_threads(2)
    subject = {"network": "tiny", "batch_size": 2, "memory_format": "contiguous"}
    settings = {"input_shape": [*X.shape], "fuse": True}
    header = Header("inference", "tiny", settings, current_environment(), tuple(subject), wanted=1)
    with open_folder(out, header) as folder:
        folder.add([Row(subject, one, samples, failure=why, more=more) for one, samples, why, more in found])
        folder.write_summary()
    return read_folder(out)


def test_the_table_tells_times_differences_and_failures(tmp_path: Path) -> None:
    (table,) = inference_tables(made_up(tmp_path / "known"))
    assert_as_stored("bench-inference-runtimes", table)
    (table,) = inference_tables(made_up(tmp_path / "wrong", wrong_s=0.001))  # it computes something else
    assert "fastest other, onnxruntime / mucudnn, fused: 1.33×" in str(table.caption)


def test_shares_of_time_are_told_where_they_are_known(tmp_path: Path) -> None:
    _, kinds = inference_tables(made_up(tmp_path, **{"3x3": 0.03, "activation": 0.01, "rest": 0.04}))
    assert_as_stored("bench-inference-kinds", kinds)


@pytest.mark.usefixtures("forked")
def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "load_model", lambda source, **_: (tiny(), (3, 8, 8)))
    outputs = {"torch": [1.0], "mucudnn": [1.0]}
    monkeypatch.setattr(inference, "prepare_runtime", partial(made_up_runtime, outputs=outputs, log=tmp_path / "log"))
    asked = ("bench", "inference", "tiny", "--rounds", "1", "--no-fuse", "--runtimes", "mucudnn")
    result = invoke(*asked, "--out", tmp_path / "out", "--database", tmp_path / "db.sqlite")
    assert result.exit_code == 0, result.output
    folder = read_folder(tmp_path / "out")
    assert [line["contestant"] for line in folder.lines] == [Runtime.TORCH, Runtime.MUCUDNN]
    assert not folder.header.settings["fuse"]
    said = fail("bench", "inference", "tiny", "--runtimes", "tensorrt")
    assert "'tensorrt'; allowed are torch, torch-compile" in said
