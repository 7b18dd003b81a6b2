"""Runtimes in comparison: turns in processes of their own, failures, outputs, and what is told of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from support.own_jobs import MadeUpRuntime
from support.snapshots import assert_as_stored
from torch import nn

from mucudnn.bench.contests.timing import MedianTime
from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.sources import trainable
from mucudnn.bench.suites.inference import comparison, runtime_job
from mucudnn.bench.suites.inference.comparison import compare_runtimes, relative_difference
from mucudnn.bench.suites.inference.report import runtime_kinds_table, runtimes_record, runtimes_table
from mucudnn.bench.suites.inference.result import RuntimeResult, RuntimesComparison
from mucudnn.bench.suites.inference.runtime import Runtime
from mucudnn.bench.suites.inference.runtime_job import RuntimeJob, require_installed, store_model
from mucudnn.bench.suites.inference.stored import InferenceFolder, header_of
from mucudnn.cli.main import main
from mucudnn.running.environment import current_environment
from mucudnn.words.config import Config
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import MemoryFormat

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def tiny() -> nn.Sequential:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    return layers.eval()


def test_runtimes_take_turns_in_processes_of_their_own(tmp_path: Path) -> None:
    """One is killed in its first call, and the others go on."""
    log = tmp_path / "log"
    job = partial(MadeUpRuntime, outputs={"torch": [3.0, 4.0], "openvino": [3.0, 4.5]}, log=log)
    torch.set_num_threads(2)
    found = compare_runtimes(
        tiny(), X, rounds=2, runtimes=(Runtime.OPENVINO, Runtime.ONNX_RUNTIME), job=job, pause_s=0.0
    )
    torchs, killed, other = found.runtimes
    assert [one.runtime for one in found.runtimes] == [Runtime.TORCH, Runtime.ONNX_RUNTIME, Runtime.OPENVINO]
    assert (torchs.difference, other.difference) == (0.0, pytest.approx(0.1))
    assert (killed.time, killed.failure) == (None, "killed by SIGKILL")
    assert torchs.time is not None
    assert other.time is not None
    assert found.speedup(other) == torchs.time.time_s / other.time.time_s
    assert found.over_best_other is None  # ours did not take part
    notes = [line.split() for line in log.read_text().splitlines()]
    assert [(name, what) for name, what, *_ in notes[:3]] == [
        ("torch", "ready"),
        ("onnxruntime", "ready"),
        ("openvino", "ready"),
    ]
    assert {threads for *_, threads in notes} == {"2"}
    assert len({process for _, _, process, _ in notes}) == 3
    turns = [name for name, what, *_ in notes if what == "called"]
    changes = sum(before != after for before, after in pairwise(turns))
    assert changes in (2, 3)  # two rounds of two runtimes, each round in an order of its own


def test_nothing_is_compared_without_torch(tmp_path: Path) -> None:
    job = partial(MadeUpRuntime, outputs={"mucudnn": [1.0]}, log=tmp_path / "log")
    with pytest.raises(UnavailableError, match="torch, with which all others are compared, fails: killed by SIGKILL"):
        compare_runtimes(tiny(), X, rounds=1, runtimes=(), job=job, pause_s=0.0)


def test_models_must_be_picklable(tmp_path: Path) -> None:
    model = tiny()
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="the model cannot be pickled: make it picklable, such as by"):
        store_model(model, (X,), tmp_path / "model.pickle")


@pytest.mark.parametrize(
    ("outputs", "expected", "difference"),
    [
        ([[3.0, 4.0]], [[3.0, 4.0]], 0.0),
        ([[3.0], [4.0 + 1e-3]], [[3.0], [4.0]], 2e-4),
        ([[0.0]], [[0.0]], 0.0),
        ([[1.0]], [[0.0]], float("inf")),
        ([[float("nan")]], [[1.0]], float("inf")),
        ([[1.0, 2.0]], [[1.0], [2.0]], float("inf")),
        ([[1.0, 2.0]], [[1.0]], float("inf")),
    ],
)
def test_outputs_are_compared_together(outputs: Any, expected: Any, difference: float) -> None:
    found = relative_difference([*map(np.array, outputs)], [*map(np.array, expected)])
    assert found == pytest.approx(difference)


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
    runtime: Runtime, memory_format: torch.memory_format, tmp_path: Path, settings_kept: None
) -> None:
    if not installed(runtime):
        pytest.skip(f"{runtime} is not installed: pip install 'mucudnn[runtimes]'")
    if runtime is Runtime.TORCH_COMPILE and memory_format is torch.channels_last:
        pytest.skip("it takes a minute, and is torch's own")
    model, x = tiny().to(memory_format=memory_format), X.contiguous(memory_format=memory_format)
    expected = model(x).detach().numpy()
    store_model(model, (x,), tmp_path / "model.pickle")
    config = Config(time_limit="10ms", fuse=True, cache_budget="1MiB")
    ready = RuntimeJob(runtime, tmp_path / "model.pickle", 1, config)()
    for outputs in (ready.found, ready.call()):
        assert relative_difference(outputs, [expected]) < 1e-5  # type: ignore[arg-type]


def test_what_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_job, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"openvino, onnx, onnxscript not installed: pip install 'mucudnn\[run"):
        require_installed(Runtime.OPENVINO)
    require_installed(Runtime.TORCH_COMPILE)


def made_up() -> RuntimesComparison:
    torchs = RuntimeResult(Runtime.TORCH, "2.13", MedianTime(0.06, 0.01), 0.0, 1.5)
    other = replace(torchs, runtime=Runtime.ONNX_RUNTIME, version="1.32", time=MedianTime(0.04, 0.02), difference=2e-7)
    wrong = replace(other, runtime=Runtime.TORCH_COMPILE, version="2.13", time=MedianTime(0.05, 0.0), difference=0.2)
    failed = RuntimeResult(Runtime.OPENVINO, "", failure="openvino not installed: pip install 'mucudnn[runtimes]'")
    ours = replace(torchs, runtime=Runtime.MUCUDNN, version="0.1.0", time=MedianTime(0.03, 0.0), difference=3e-7)
    both = replace(ours, runtime=Runtime.MUCUDNN_COMPILE, time=MedianTime(0.025, 0.0), kinds_s={"3x3": 0.02})
    every = (torchs, wrong, other, failed, ours, both)
    return RuntimesComparison("tiny", (2, 3, 8, 8), Config(fuse=True), current_environment(), 2, every, 25)


def test_the_table_tells_times_differences_and_failures() -> None:
    assert_as_stored("bench-inference-runtimes", runtimes_table(made_up()))


def test_the_record_has_every_runtime() -> None:
    record = json.loads(json.dumps(runtimes_record(made_up())))
    assert record["best_other_over_mucudnn"] == pytest.approx(0.04 / 0.03)
    assert record["fused"] is True
    assert [one["runtime"] for one in record["runtimes"]] == list(Runtime)
    assert record["runtimes"][3] == {
        "runtime": "openvino",
        "version": "",
        "time_s": None,
        "noise": None,
        "speedup": None,
        "relative_difference": None,
        "ready_after_s": None,
        "failure": "openvino not installed: pip install 'mucudnn[runtimes]'",
        "images_per_s": None,
        "kinds_s": {},
    }
    assert (record["runtimes"][5]["images_per_s"], record["runtimes"][5]["kinds_s"]) == (2 / 0.025, {"3x3": 0.02})


def test_what_computes_something_else_is_not_the_best_of_the_others() -> None:
    fast = made_up()
    wrong = replace(fast.runtimes[1], time=MedianTime(0.001, 0.0))
    found = replace(fast, runtimes=(fast.runtimes[0], wrong, *fast.runtimes[2:]))
    assert found.best_other is found.runtimes[2]


def on_the_command_line(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(trainable, "trainable_model", lambda source, **_: (tiny(), (3, 8, 8)))
    return CliRunner().invoke(main, ["bench", "inference", "tiny", "--rounds", "1", "--time-limit", "10ms", *arguments])


def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def compared(model: nn.Module, arguments: Any, config: Config, **rest: Any) -> RuntimesComparison:
        given.update(rest, config=config)
        return replace(made_up(), config=config)

    monkeypatch.setattr(comparison, "compare_runtimes", compared)
    file = tmp_path / "inference.json"
    done = on_the_command_line(monkeypatch, "--runtimes", "openvino, mucudnn", "--no-fuse", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert given["runtimes"] == (Runtime.OPENVINO, Runtime.MUCUDNN)
    assert not given["config"].fuse
    record = json.loads(file.read_text())
    assert record["fused"] is False
    assert len(record["layers"]) == 2
    assert len(record["runtimes"]) == len(Runtime)


def test_nothing_to_measure_and_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    done = on_the_command_line(monkeypatch, "--no-layers", "--runtimes", "none")
    assert (done.exit_code, "leave out --no-layers, or name --runtimes" in done.output) == (2, True)
    done = on_the_command_line(monkeypatch, "--runtimes", "tensorrt")
    assert done.exit_code == 2
    assert "'tensorrt' is no runtime; allowed are torch, torch-compile" in done.output


def test_shares_of_time_are_told_where_they_are_known() -> None:
    torchs, *others = made_up().runtimes
    known = replace(torchs, kinds_s={"3x3": 0.03, "activation": 0.01, "rest": 0.04})
    assert_as_stored("bench-inference-kinds", runtime_kinds_table(replace(made_up(), runtimes=(known, *others))))
    unknown = tuple(replace(one, kinds_s={}) for one in made_up().runtimes)
    assert runtime_kinds_table(replace(made_up(), runtimes=unknown)) is None


def test_what_the_folder_has_is_not_measured_again(tmp_path: Path) -> None:
    header = header_of("tiny", (2, 3, 8, 8), MemoryFormat.CONTIGUOUS, Config(), 2, ["runtimes"], current_environment())
    job = partial(MadeUpRuntime, outputs={"torch": [3.0, 4.0], "openvino": [3.0, 4.5]}, log=tmp_path / "log")

    def compared(made: Any) -> RuntimesComparison:
        with open_folder(tmp_path / "folder", header) as folder:
            kept = InferenceFolder(folder, "tiny", (2, 3, 8, 8), MemoryFormat.CONTIGUOUS)
            runtimes = (Runtime.OPENVINO, Runtime.ONNX_RUNTIME)
            return compare_runtimes(
                tiny(), X, name="tiny", rounds=2, runtimes=runtimes, job=made, pause_s=0.0, kept=kept
            )

    first, again = compared(job), compared(None)
    assert again.runtimes == first.runtimes
    assert (
        read_folder(tmp_path / "folder").rows.set_index("contestant")["failure"]["onnxruntime"] == "killed by SIGKILL"
    )
