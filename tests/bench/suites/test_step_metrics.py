"""``mucudnn bench metrics`` of a model: errors against the same step in float64, by definition, on tiny models."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.clock.machine import ENVIRONMENT
from support.command_line import invoke
from support.snapshots import assert_as_stored
from torch import Tensor, nn
from torch.nn import functional as F

import mucudnn
from mucudnn.bench.results.reading import Header, Line, read_folder
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites import metrics
from mucudnn.bench.suites.metrics import benchmark_step, step_tables
from mucudnn.core.config import Config

CONFIG = Config(algorithms=("gemm",), time_limit="20ms")
SHAPE = (3, 12, 12)


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 10, 3), nn.AvgPool2d(8), nn.Flatten())


def measure(model: nn.Module, out: Path, error_bounds: tuple[float, ...] = (1e-5,)) -> tuple[Line, ...]:
    (batch,) = labelled_batches(1, 4, SHAPE)
    benchmark_step("tiny", (model, batch, F.cross_entropy), CONFIG, out, error_bounds=error_bounds)
    return read_folder(out).lines


def step(model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    ((images, labels),) = labelled_batches(1, 4, SHAPE)
    own = copy.deepcopy(model).to(dtype)
    output = own(images.to(dtype))
    F.cross_entropy(output, labels).backward()
    return output.detach().double(), [p.grad.double() for p in own.parameters() if p.grad is not None]


def test_errors_are_those_of_the_definition_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    torchs, ours = measure(model, tmp_path / "out")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    (output, gradients), (exact_output, exact_gradients) = (step(model, t) for t in (torch.float32, torch.float64))
    assert torchs["output"] == pytest.approx(float((output - exact_output).norm() / exact_output.norm()))
    found, exact = (torch.cat([g.flatten() for g in every]) for every in (gradients, exact_gradients))
    assert torchs["relative_error"] == pytest.approx(float((found - exact).norm() / exact.norm()))
    names = [name for name, _ in model.named_parameters()]
    own = {n: float((f - e).norm() / e.norm()) for n, f, e in zip(names, gradients, exact_gradients, strict=True)}
    assert own.pop("0.bias") > 1  # Its gradient is zero but for rounding, since batch norm follows, and does not count.
    worst = max(own, key=lambda name: own[name])
    assert (torchs["worst"], torchs["worst_parameter"]) == (pytest.approx(own[worst]), worst)
    assert 0 < ours["output"] < 1e-5
    assert 0 < ours["relative_error"] < 1e-3
    assert (torchs["operations"], ours["operations"]) == (0, 5)  # the first layer needs no dx
    monkeypatch.setattr(metrics, "_compared", None)
    assert measure(tiny(), tmp_path / "out") == (torchs, ours)


def test_a_wrong_convolution_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(model: nn.Module, arguments: object, config: Config, progress: bool) -> nn.Module:
        assert config == replace(
            CONFIG, max_relative_error=1e-5, confirm=False
        )  # nothing is put back before it is compared
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        return model

    monkeypatch.setattr(mucudnn, "optimize", spoilt)
    torchs, ours = measure(tiny(), tmp_path / "out")
    assert torchs["relative_error"] < 1e-3 < ours["relative_error"]


def test_each_error_bound_has_its_row(tmp_path: Path) -> None:
    torchs, loose, tight = measure(tiny(), tmp_path, (1e-5, 1e-12))
    assert [row["contestant"] for row in (torchs, loose, tight)] == ["torch", "mucudnn 1e-05", "mucudnn 1e-12"]
    assert (loose["operations"], tight["operations"], tight["ours"]) == (5, 5, 0)
    assert (tight["output"], tight["relative_error"]) == (torchs["output"], torchs["relative_error"])


def test_what_is_printed(tmp_path: Path) -> None:
    subject = {"network": "resnet50", "batch_size": 8, "dtype": "float32", "memory_format": "contiguous"}
    header = Header("metrics", "resnet50", {}, ENVIRONMENT, tuple(subject), wanted=1, is_timed=False)
    with open_folder(tmp_path / "out", header) as folder:
        for k, variant in ((1, "torch"), (2, "mucudnn 1e-05")):
            more = {"output": 5e-5 * k, "loss": 1e-8, "worst": 0.1, "worst_parameter": "stem.weight"}
            more |= {"operations": 3 * (k - 1), "ours": k - 1, "speedup": 1.25 if k == 2 else None}
            folder.add([Row(subject, variant, relative_error=2.4e-2, more=more)])
    assert_as_stored("bench-metrics-step", *step_tables(read_folder(tmp_path / "out")))


def test_the_command_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model_of_errors.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Conv2d(3, 4, 3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MUCUDNN_TIME_LIMIT", "20ms")
    result = invoke(
        *("bench", "metrics", "own_model_of_errors:make", "--input", "3x8x8", "--batch", "2", "--algorithms", "gemm"),
        *("--threads", "1", "--max-relative-error", "1e-5,1e-6", "--out", tmp_path / "out"),
    )
    assert result.exit_code == 0, result.output
    assert "batch 2, contiguous: one training step in float32 against float64" in result.output
    names = [row["contestant"] for row in read_folder(tmp_path / "out").lines]
    assert names == ["torch", "mucudnn 1e-05", "mucudnn 1e-06"]
