"""The inference benchmark: what is measured, told and recorded; on tiny layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.clock.ticking import TickingClock
from support.cuda.placeholders import on_cuda
from support.snapshots import assert_as_stored
from torch import nn

from mucudnn.bench.sources import trainable
from mucudnn.bench.suites.inference.benchmark import benchmark_inference
from mucudnn.bench.suites.inference.report import inference_record, inference_table
from mucudnn.bench.suites.inference.result import InferenceBenchmark
from mucudnn.cli.main import main
from mucudnn.running.filter_cache import CachedFilter
from mucudnn.words.config import Config
from mucudnn.words.errors import UnavailableError
from mucudnn.words.results import Configuration, MicroConfig

NATIVE = Configuration((MicroConfig("native", 2),), 1.0, 0)
CONFIG = Config(workspace_limit=None, cache_budget=None, time_limit="50ms")


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> InferenceBenchmark:
    config = replace(CONFIG, database=tmp_path_factory.mktemp("database") / "measurements.sqlite")
    return benchmark_inference(tiny(), torch.randn(2, 3, 8, 8), config, name="tiny", rounds=3, clock=TickingClock())


def test_every_convolution_is_measured_in_three_variants_as_often_as_asked(benchmark: InferenceBenchmark) -> None:
    assert [layer.name for layer in benchmark.layers] == ["0", "3"]
    for variants in (benchmark.whole, *(layer.variants for layer in benchmark.layers)):
        assert variants.speedup == variants.gain == 1.0  # by this clock every call takes as long
    assert [layer.tuned.problem.r for layer in benchmark.layers] == [3, 1]
    assert benchmark.filter_bytes == 4 * (4 * 3 * 9 + 4 * 4)


def test_the_model_stays_as_it_is() -> None:
    model, seen = tiny(), []
    model.train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    benchmark_inference(model, torch.randn(1, 3, 8, 8), CONFIG, rounds=1, progress=lambda text, done: seen.append(done))
    assert type(model[0]) is nn.Conv2d
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert seen == sorted(seen)
    assert 0 <= seen[0] <= seen[-1] < 1


def with_something_kept(benchmark: InferenceBenchmark) -> InferenceBenchmark:
    first, second = (replace(layer, tuned=replace(layer.tuned, configuration=NATIVE)) for layer in benchmark.layers)
    configuration = Configuration((MicroConfig("winograd-4x4", 2),), 1.0, 0)
    kept = CachedFilter(first.tuned.problem, "winograd-4x4", 3 * 2**20, {2: configuration})
    return replace(benchmark, layers=(replace(first, kept=kept), replace(second, kept=None)))


def test_the_table_shows_what_is_kept(benchmark: InferenceBenchmark) -> None:
    assert_as_stored("bench-inference", inference_table(with_something_kept(benchmark)))


def test_the_record_is_plain_json(benchmark: InferenceBenchmark) -> None:
    record = json.loads(json.dumps(inference_record(with_something_kept(benchmark))))
    assert record["network"] == "tiny"
    assert record["kept_bytes"] == 3 * 2**20
    first, second = record["layers"]
    assert (first["kept_configuration"], first["kept_algorithm"]) == ("winograd-4x4 2", "winograd-4x4")
    assert second["kept_configuration"] is None
    assert record["whole"]["speedup"] == record["whole"]["torch_s"] / record["whole"]["kept_s"]


def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny().to(memory_format=torch.channels_last)
    monkeypatch.setattr(trainable, "trainable_model", lambda source, **_: (model, (3, 8, 8)))
    file = tmp_path / "inference.json"
    arguments = [
        "bench",
        "inference",
        "tiny",
        "--rounds",
        "1",
        "--cache-budget",
        "1KiB",
        "--time-limit",
        "50ms",
        "--runtimes",
        "none",
    ]
    done = CliRunner().invoke(main, [*arguments, "--memory-format", "channels-last", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "the whole model" in done.output
    record = json.loads(file.read_text())
    assert record["config"]["cache_budget"] == "1KiB"
    assert record["kept_bytes"] <= 1024
    assert {layer["problem"]["memory_format"] for layer in record["layers"]} == {"channels_last"}


def test_elsewhere_than_on_the_cpu_there_is_nothing_to_compare() -> None:
    with pytest.raises(UnavailableError, match="x is on cuda:1, and filters are kept on the CPU alone"):
        benchmark_inference(nn.Conv2d(3, 4, 3), on_cuda(torch.empty(1, 3, 8, 8), 1))
