"""The commands and the Python interface with ``--device cuda``, from end to end, in a process that believes in a GPU.

What they compute is checked on real devices (``test_gpu*.py``) and piece by piece; here all pieces have to fit.
"""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from support.command_line import fail, invoke
from support.cuda.emulator import COMPILER, EmulatedLauncher
from support.cuda.process import PretendedGpu, emulated_launcher, gpu
from support.cuda.runtime import NAME
from support.cuda.tensors import GPU
from support.in_threads import remember_in_threads, train_in_threads
from support.models_by_name import trained
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.sources import trainable
from mucudnn.bench.suites.gpu import engine_differences
from mucudnn.bench.suites.gpu import suite as gpu_suite
from mucudnn.bench.suites.gpu.device_record import main as device_record
from mucudnn.bench.suites.gpu.parts import SuitePart, parts
from mucudnn.bench.suites.overhead import divided as divided_overhead
from mucudnn.bench.suites.training import several
from mucudnn.cli.main import main as mucudnn_command
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat

__all__ = ["emulated_launcher", "gpu"]  # fixtures
ON_GPU = ("--input", "3x9x9", "--batch", "3", "--device", "cuda")
QUICK = ("--time-limit", "30ms", "--algorithms", "cudnn")
TINY = "support.models_by_name:tiny"
TRAINED = "support.models_by_name:trained"


def run(*arguments: object) -> str:
    """What the command prints, whole: no cell is cut off."""
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "…" not in result.stdout
    return result.stdout


def run_module(command: click.Command, *arguments: object) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def reasons(database: Path) -> list[str]:
    """Of everything that was measured, and failed."""
    with closing(sqlite3.connect(database)) as connection:
        return [
            reason
            for (reason,) in connection.execute(
                "SELECT reason FROM measurements WHERE reason NOT NULL AND passed_over IS NULL"
            )
        ]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_that_is_for_cuda_can_be_measured_and_chosen_from(dtype: str, database: Path) -> None:
    tuned = run("tune", TINY, *ON_GPU, "--dtype", dtype, "--memory-format", "channels-last", "--policy", "undivided")
    assert f"{NAME} (sm90), torch {torch.__version__}, cuDNN 9.19.0, tf32" in tuned
    assert reasons(database) == []
    with closing(sqlite3.connect(database)) as connection:
        measured = {name.split(":")[0] for (name,) in connection.execute("SELECT algorithm FROM measurements")}
    assert {
        "native",
        "native-other-format",
        "native-benchmark-0",
        "gemm",
        "direct",
        "winograd-4x4",
        "cudnn",
    } <= measured
    sizes = (
        "--network",
        TINY,
        "--input",
        "3x9x9",
        "--batch",
        "3",
        "--dtype",
        dtype,
        "--memory-format",
        "channels-last",
    )
    assert NAME in run("solve", database, *sizes, "--workspace-limit", "2KiB")
    assert NAME in run("solve", database, *sizes, "--workspace-limit", "headroom", "--device", "cuda")


@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_our_own_cuda_functions_are_measured(emulated_launcher: EmulatedLauncher, database: Path) -> None:
    run("tune", TINY, *ON_GPU, "--algorithms", "winograd-4x4", "--policy", "undivided")
    assert {"transform_filter", "transform_source", "inverse_transform"} <= {*emulated_launcher.launched}
    assert reasons(database) == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "arguments",
    [
        ("tune", TRAINED, *ON_GPU, *QUICK, "--workspace-budget", "1MiB"),
        ("tune", TRAINED, *ON_GPU, *QUICK, "--workspace-limit", "headroom", "--deterministic"),
        ("explain", TINY, *ON_GPU, *QUICK, "--budget", "1MiB"),
        ("explain", TRAINED, *ON_GPU, *QUICK, "--headroom"),
        ("batch", TINY, "--input", "3x9x9", "--up-to", "3", "--device", "cuda", *QUICK),
        ("bench", "network", TINY, *ON_GPU, *QUICK, "--rounds", "2"),
        ("bench", "memory", TRAINED, *ON_GPU, *QUICK, "--rounds", "2", "--variants", "torch-benchmark,mucudnn"),
        ("bench", "limits", TINY, *ON_GPU, *QUICK, "--limits", "1KiB,1MiB", "--rounds", "1", "--seconds", "60"),
    ],
    ids=lambda arguments: "-".join(word for word in arguments[:2] if "pretended" not in word),
)
def test_commands_run(
    arguments: tuple[str, ...], database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_in_threads(monkeypatch, "cuda")
    file = tmp_path / "result.json"
    assert NAME in run(*arguments, "--json", file)
    assert json.loads(file.read_text())
    assert reasons(database) == []


@pytest.mark.usefixtures("gpu")
def test_training_is_compared_in_every_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train_in_threads(monkeypatch, "cuda")
    monkeypatch.setattr(trainable, "build", lambda name: trained())
    monkeypatch.setattr(several, "input_shape_of", lambda name: (3, 9, 9))
    file = tmp_path / "result.json"
    asked = ("--batch", "3", "--device", "cuda", "--rounds", "1", "--memory-format", "channels-last", "--json", file)
    told = run("bench", "training", "alexnet", "--variants", "torch-benchmark,mucudnn", *asked, *QUICK)
    assert all(word in told for word in ("tf32", "float32", "bfloat16", "torch-benchmark", NAME))
    cells = json.loads(file.read_text())["cells"]
    assert len(cells) == 9
    assert [cell["failure"] for cell in cells if cell["failure"]] == []


@pytest.mark.usefixtures("gpu")
def test_the_device_is_described() -> None:
    told = run("doctor")
    assert f"cuda:0: {NAME}, sm90, 1 GiB" in told
    assert f"Algorithms on {NAME} (cuda:0)" in told
    listed = run("engines", TINY, "--input", "3x9x9", "--batch", "2")
    assert NAME in listed
    assert "cudnn:2 k2=5" in listed
    record = json.loads(run_module(device_record, "--device", "cuda"))
    assert record["environment"]["device"] == NAME
    assert record["properties"] == {"deviceName": "Here"}


@pytest.mark.usefixtures("gpu")
def test_lists_of_this_device_and_of_a_described_one_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = next(engine_differences.recorded_problems())
    monkeypatch.setattr(engine_differences, "recorded_problems", lambda: [problem])
    told = run_module(engine_differences.main, tmp_path / "result.json")
    assert told.startswith("0 of 3 lists differ")


def test_the_overhead_of_a_divided_call_is_measured_in_graphs_too(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divided_overhead, "MICRO_BATCH_SIZES", {"cuda": {"small": 1}, "cpu": {}})
    monkeypatch.setattr(divided_overhead, "MICRO_BATCHES", 2)
    monkeypatch.setattr(divided_overhead, "COPIES", 2)
    told = run_module(divided_overhead.main, "--device", "cuda", "--rounds", "1").splitlines()
    assert sum("in a CUDA graph" in line for line in told) == sum("called from Python" in line for line in told) == 3


def without_work(command: click.Command, arguments: list[str]) -> None:
    """Parse them as the command would."""
    context = command.make_context("test", arguments)
    while isinstance(command, click.Group):
        _, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        context = command.make_context("test", arguments, parent=context)


@pytest.mark.parametrize("part", [p for p in parts("cuda") if p.arguments[0] != "pytest"], ids=lambda part: part.name)
def test_commands_of_the_suite_are_ones_that_there_are(part: SuitePart, tmp_path: Path) -> None:
    _, _, module, *arguments = gpu_suite._command(part, tmp_path, 60.0)
    modules = {
        "mucudnn": mucudnn_command,
        "mucudnn.bench.suites.overhead.divided": divided_overhead.main,
        "mucudnn.bench.suites.gpu.engine_differences": engine_differences.main,
    }
    without_work(modules[module], arguments)


def results(model: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    """The output and all gradients."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().mean().backward()
    return [y.detach().float(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(
    ("choices", "memory_format", "autocast"),
    [
        ({}, torch.contiguous_format, False),
        ({}, torch.channels_last, True),
        ({"workspace_limit": "headroom"}, torch.channels_last, False),
        ({"workspace_budget": "1MiB"}, torch.contiguous_format, True),
        ({"deterministic": True}, torch.contiguous_format, False),
    ],
    ids=str,
)
@pytest.mark.filterwarnings(r"ignore:Config\(deterministic=True\)")
def test_models_train_as_with_torch(
    gpu: PretendedGpu, choices: dict[str, Any], memory_format: torch.memory_format, autocast: bool
) -> None:
    theirs = trained().cuda().to(memory_format=memory_format)  # type: ignore[call-overload]
    x = torch.randn(4, 3, 9, 9, device="cuda").contiguous(memory_format=memory_format)
    config = Config(time_limit="200ms", algorithms=("cudnn",), **choices)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        ours = mucudnn.optimize(copy.deepcopy(theirs), x, config)
    gpu.backend.executed.clear()
    for batch in (x, x[:3], torch.cat([x, x])):
        for mine, torchs in zip(results(ours, batch, autocast), results(theirs, batch, autocast), strict=True):
            assert mine.device == GPU
            close = 0.03 if autocast else 1e-4
            torch.testing.assert_close(mine.cpu(), torchs.cpu(), rtol=close, atol=close)
    assert {plan.problem.memory_format for plan in gpu.backend.executed} <= {
        MemoryFormat.CHANNELS_LAST if memory_format is torch.channels_last else MemoryFormat.CONTIGUOUS
    }
    assert gpu.backend.executed
    assert "cudnn:" in mucudnn.report(ours).details()
    torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9).step()


def on_two_devices(x: Tensor) -> Tensor:
    return x + torch.ones(2)


def waiting(x: Tensor) -> Tensor:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        return x * x.sum().item()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("mistake", "said"), [(on_two_devices, "same device"), (waiting, "capturing")])
def test_the_pretence_refuses_what_a_gpu_refuses(mistake: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        mistake(torch.ones(2, device="cuda"))


def test_without_a_gpu_the_headroom_says_what_is_missing(database: Path) -> None:
    sizes = ("--input", "3x9x9", "--device", "cuda")
    within = ("--workspace-limit", "headroom")
    for command in (("explain", TRAINED, "--headroom"), ("solve", database, "--network", TRAINED, *within)):
        assert "device is 'cuda', but torch" in fail(*command, *sizes)
