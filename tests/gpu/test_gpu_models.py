"""Tuned modules and models on a GPU: training, CUDA graphs, ``torch.compile``, streams, threads, several devices.

``pytest -m gpu`` runs what needs a GPU; the same tests run on the CPU, where a graph is a call and all streams are one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.always_ours import choose_always_ours
from support.command_line import HEADING, invoke, rows
from support.cuda.either_device import captured, new_stream, wait_for_all
from support.peaks import repeatable_step
from support.problems.nets import conv_net
from support.trainings import trained
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites.shared.step_costs import allocator_peak_bytes
from mucudnn.core.config import Config
from mucudnn.core.problem import Operation

pytestmark = pytest.mark.filterwarnings("default")  # what a driver or library warns of is no failure of a convolution

N, C, K, SIZE = 4, 16, 24, 14
OURS = {"cuda": ("cudnn",), "cpu": ("gemm",)}  # on the CPU there is no source of engines
TIME_LIMIT = {"cuda": "10s", "cpu": "500ms"}  # of a problem: on a GPU engines are built, and some compiled
CLOSE = {"rtol": 1e-3, "atol": 1e-3}  # sums of a few hundred products of normal numbers, in any order


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    """So that torch's result is one to compare with."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def whether_faster_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared here are results: so ours are chosen even where torch is as fast."""
    choose_always_ours(monkeypatch)


def config(device: str, **choices: Any) -> Config:
    return Config(**({"algorithms": OURS[device], "time_limit": TIME_LIMIT[device]} | choices))


def tuned(module: nn.Module, x: Tensor, **choices: Any) -> nn.Module:
    """A copy whose convolutions all run something of ours."""
    ours = mucudnn.optimize(copy.deepcopy(module), x, config(x.device.type, **choices))
    chosen = mucudnn.report(ours).layers
    assert chosen
    assert [str(tuned) for _, tuned in chosen if tuned.configuration.is_baseline] == []
    return ours


def pair(device: str, **choices: Any) -> tuple[nn.Conv2d, nn.Module]:
    """Torch's convolution and the tuned one."""
    torchs = nn.Conv2d(C, K, 3, padding=1).to(device)
    return torchs, tuned(torchs, torch.randn(N, C, SIZE, SIZE, device=device).requires_grad_(), **choices)


def fresh(device: str) -> Tensor:
    return torch.randn(N, C, SIZE, SIZE, device=device)


def results(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """y and the gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    y = module(x)
    return y.detach(), *torch.autograd.grad(y.square().mean(), (x, *module.parameters()))


def assert_same(module: nn.Module, torchs: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(results(module, x), results(torchs, x), **CLOSE)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_tuned_module_is_torchs(memory_format: torch.memory_format, device: str) -> None:
    torchs = cast(nn.Module, nn.Conv2d(C, K, 3, padding=1).to(device, memory_format=memory_format))
    x = fresh(device).contiguous(memory_format=memory_format)
    assert_same(tuned(torchs, x.clone().requires_grad_()), torchs, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype, device: str) -> None:
    torchs, x = nn.Conv2d(C, K, 3, padding=1).to(device), fresh(device)
    with torch.autocast(device, dtype):
        ours = tuned(torchs, x.clone().requires_grad_())
        actual, expected = results(ours, x), results(torchs, x)
    assert [t.dtype for t in actual] == [t.dtype for t in expected]
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_a_model_trains_like_torchs(device: str) -> None:
    """No further from torch than torch is from itself in the other memory format, but for a little."""
    model = conv_net().to(device)
    batches = [(x.to(device), labels.to(device)) for x, labels in labelled_batches(3, 8, (3, 12, 12))]
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torchs, ours, others = (trained(one, batches) for one in (model, tuned(model, batches[0][0]), other))
    assert ours.loss_difference(torchs) <= max(1e-4, 10 * others.loss_difference(torchs))
    assert ours.gradient_difference(torchs) <= max(1e-3, 10 * others.gradient_difference(torchs))


def test_a_step_takes_no_more_memory_than_the_limit_allows(device: str) -> None:
    torchs, limit = nn.Conv2d(C, K, 3, padding=1).to(device), 2**20
    x = fresh(device).requires_grad_()
    ours = tuned(torchs, x, workspace_limit=limit)
    peaks = [allocator_peak_bytes(repeatable_step(module, x), device) for module in (torchs, ours)]
    assert peaks[1] <= peaks[0] + limit + 2**12  # the allocator rounds up


def test_the_command_tunes_and_measures_nothing_twice(device: str, tmp_path: Path, database: Path) -> None:
    (tmp_path / "layers.csv").write_text(HEADING + f"one,{C},{SIZE},{SIZE},{K},3,3,1,1,1,1\n")
    written = tmp_path / "tuned.json"
    arguments = ("tune", tmp_path / "layers.csv", "--batch", 2, "--device", device, "--time-limit", TIME_LIMIT[device])
    options = ("--algorithms", ",".join(OURS[device]), "--json", written)
    seen = []
    for _ in range(2):
        result = invoke(*arguments, *options)
        assert result.exit_code == 0, result.output
        seen.append(rows(database))
    first, second = seen
    assert first
    assert {*first} <= {*second}  # a time limit that was short leaves something to the second run
    assert len({row[:4] for row in second}) == len(second)
    assert len(json.loads(written.read_text())["problems"]) == len(Operation)


# Where operands lie


# CUDA graphs


def test_a_graph_computes_with_fresh_inputs(device: str) -> None:
    torchs, ours = pair(device)
    x, y = fresh(device), torch.empty(N, K, SIZE, SIZE, device=device)

    @torch.no_grad()
    def work() -> None:
        y.copy_(ours(x))

    replay = captured(work, device)
    for _ in range(3):
        x.copy_(fresh(device))
        replay()
        wait_for_all(device)
        torch.testing.assert_close(y, torchs(x).detach(), **CLOSE)


def test_a_graph_of_a_training_step(device: str) -> None:
    torchs, ours = pair(device)
    x = fresh(device).requires_grad_()
    operands = (x, *ours.parameters())
    gradients = [torch.empty_like(operand) for operand in operands]

    def work() -> None:
        for kept, gradient in zip(gradients, torch.autograd.grad(ours(x).square().mean(), operands), strict=True):
            kept.copy_(gradient)

    replay = captured(work, device)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(fresh(device))
        replay()
        wait_for_all(device)
        torch.testing.assert_close(tuple(gradients), results(torchs, x)[1:], **CLOSE)


@pytest.fixture
def compile_as(device: str) -> dict[str, str]:
    """On the CPU without code generation, which takes a compiler and its time."""
    if device == "cuda":
        pytest.importorskip("triton", reason="torch.compile needs Triton on a GPU")
    return {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager"}


def test_compiled_to_graphs(device: str, compile_as: dict[str, Any]) -> None:
    torchs, ours = pair(device)
    compiled = cast(nn.Module, torch.compile(nn.Sequential(ours, nn.ReLU()), fullgraph=True, **compile_as))
    for _ in range(4):  # eagerly, recorded, replayed
        torch.compiler.cudagraph_mark_step_begin()
        x = fresh(device)
        actual = tuple(result.clone() for result in results(compiled, x))
        torch.testing.assert_close(actual, results(nn.Sequential(torchs, nn.ReLU()), x), **CLOSE)


# Streams and threads


def test_several_threads_at_once(device: str) -> None:
    torchs, ours = pair(device)
    inputs = [fresh(device) for _ in range(4)]

    def steps(x: Tensor) -> list[tuple[Tensor, ...]]:
        torch.set_num_threads(1)
        with new_stream(device):
            found = [results(ours, x) for _ in range(5)]
            wait_for_all(device)
        return found

    with ThreadPoolExecutor(len(inputs)) as threads:
        every = list(threads.map(steps, inputs))
    for x, found in zip(inputs, every, strict=True):
        expected = results(torchs, x)
        for actual in found:
            torch.testing.assert_close(actual, expected, **CLOSE)


# Settings
