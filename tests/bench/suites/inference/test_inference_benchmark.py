"""Inference with and without kept filters: what is measured and told; on tiny layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.clock.machine import ENVIRONMENT
from support.clock.ticking import TickingClock
from support.cuda.placeholders import on_cuda
from support.snapshots import assert_as_stored
from torch import Tensor, nn

from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.suites.inference import report
from mucudnn.bench.suites.inference.filters import benchmark_filters
from mucudnn.bench.suites.inference.report import FILTERS, KEPT, NOT_KEPT, WHOLE, InferenceRun, inference_tables
from mucudnn.words.config import Config
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import Progress, silent

CONFIG = Config(workspace_limit=None, cache_budget=None, time_limit="50ms")
CONTESTANTS = ("torch", NOT_KEPT, KEPT)


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))


def measured(out: Path, model: nn.Module, x: Tensor, progress: Progress = silent) -> ResultFolder:
    config = replace(CONFIG, database=out.parent / "measurements.sqlite")
    with InferenceRun.opened(out, "tiny", x.shape, MemoryFormat.CONTIGUOUS, config, 3, [FILTERS]) as run:
        benchmark_filters(replace(run, clock=TickingClock()), model, (x,), config, progress)
    return read_folder(out)


def test_every_convolution_is_measured_in_three_variants_and_the_next_run_measures_nothing(tmp_path: Path) -> None:
    model, x, seen = tiny().train(), torch.randn(2, 3, 8, 8), list[float]()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder = measured(tmp_path / "folder", model, x, lambda text, done: seen.append(done))
    assert [(line["layer"], line["contestant"]) for line in folder.lines] == [
        (layer, name) for layer in (WHOLE, "0", "3") for name in CONTESTANTS
    ]
    assert {tuple(line["samples_s"]) for line in folder.lines} == {(1.0,) * 3}
    filter_bytes = {WHOLE: None, "0": 4 * 4 * 3 * 9, "3": 4 * 4 * 4}
    assert {line["layer"]: line.get("filter_bytes") for line in folder.lines} == filter_bytes
    assert type(model[0]) is nn.Conv2d
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert seen == sorted(seen)
    assert 0 <= seen[0] <= seen[-1] < 1
    assert measured(tmp_path / "folder", model, x).lines == folder.lines


def test_the_table_shows_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "current_environment", lambda: ENVIRONMENT)
    kept = {"0": ("winograd-4x4 2", 3 * 2**20, 432), "3": ("native 2", 0, 64)}
    with InferenceRun.opened(tmp_path, "tiny", (2, 3, 8, 8), MemoryFormat.CONTIGUOUS, CONFIG, 1, [FILTERS]) as run:
        run.folder.add([Row(run.subject(FILTERS), name, (1.0,)) for name in CONTESTANTS])
        for layer, (configuration, kept_bytes, filter_bytes) in kept.items():
            more = {"kept_bytes": kept_bytes, "filter_bytes": filter_bytes}
            chosen = dict(zip(CONTESTANTS, (None, "native 2", configuration), strict=True))
            subject = run.subject(FILTERS, layer)
            run.folder.add([Row(subject, name, (1.0,), configuration=chosen[name], more=more) for name in CONTESTANTS])
    (table,) = inference_tables(read_folder(tmp_path))
    assert_as_stored("bench-inference", table)


def test_elsewhere_than_on_the_cpu_there_is_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="x is on cuda:1, but filters are cached only on the CPU"):
        measured(tmp_path / "folder", nn.Conv2d(3, 4, 3), on_cuda(torch.empty(1, 3, 8, 8), 1))
