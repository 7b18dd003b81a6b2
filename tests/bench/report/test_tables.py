"""Tables and records say what the results say: seconds inside, milliseconds and MiB where it is printed."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from support.snapshots import assert_as_stored

from mucudnn.bench.analyses.layers import layers_table
from mucudnn.bench.analyses.tuning_report import tuning_record, tuning_table
from mucudnn.bench.contests.timing import MedianTime
from mucudnn.bench.sources.layers import load_source
from mucudnn.bench.sources.table_tuning import TableTuning, TunedLayer
from mucudnn.bench.suites.network.report import network_record, network_table
from mucudnn.bench.suites.network.result import FormatResult, NetworkBenchmark, ProblemResult
from mucudnn.bench.suites.training.demo_report import training_table
from mucudnn.bench.suites.training.side_by_side import (
    Difference,
    GradientErrors,
    TrainingComparison,
    train_in_turns,
)
from mucudnn.bench.suites.training.trainee import labelled_batches
from mucudnn.running.environment import Environment
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Configuration, MicroConfig

ENVIRONMENT = Environment("a CPU", "AVX2", 2, "2.13.0", "oneDNN 3.12.0", "avx2")
PROBLEM = ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, padding=(1, 1))
CHOSEN = Configuration((MicroConfig("winograd-4x4", 8),) * 4, time_s=0.021, workspace_bytes=3 << 20)


def tuned(baseline_s: float = 0.06, time_s: float = 0.02) -> TunedProblem:
    return TunedProblem(PROBLEM, 32, CHOSEN, baseline_s, time_s, 2e-6, "faster than torch")


def table_tuning(wanted: int = 2) -> TableTuning:
    rows = (TunedLayer(("conv1",), 3, tuned()), TunedLayer(("conv2",), 1, tuned(0.02, 0.02)))
    return TableTuning("mynet", Config(), ENVIRONMENT, rows, wanted)


def benchmark() -> NetworkBenchmark:
    formats = {
        MemoryFormat.CONTIGUOUS: FormatResult(MedianTime(0.06, 0.01), MedianTime(0.02, 0.02), tuned()),
        MemoryFormat.CHANNELS_LAST: FormatResult(MedianTime(0.03, 0.01), MedianTime(0.024, 0.02), tuned()),
    }
    problem = ProblemResult(("conv1",), Operation.FORWARD, 2, formats)
    return NetworkBenchmark("mynet", Config(), ENVIRONMENT, (problem,), rounds=15)


def test_tuning_table_has_a_row_for_each_operation_and_totals() -> None:
    assert_as_stored("tune", tuning_table(table_tuning()))


def test_tuning_table_of_nothing_still_prints() -> None:
    assert_as_stored("tune-nothing", tuning_table(TableTuning("mynet", Config(), ENVIRONMENT, (), 5)))


def test_tuning_record_is_json_with_seconds_and_bytes() -> None:
    record = json.loads(json.dumps(tuning_record(table_tuning(wanted=5))))
    assert record["complete"] is False
    assert record["environment"]["threads"] == 2
    assert record["total"]["speedup"] == pytest.approx(2.5)
    first = record["problems"][0]
    assert (first["torch_s"], first["mucudnn_s"], first["predicted_s"]) == (0.06, 0.02, 0.021)
    assert (first["operation"], first["configuration"], first["workspace_bytes"]) == (
        "forward",
        "winograd-4x4 8×4",
        3 << 20,
    )


def test_network_totals_count_each_convolution_as_often_as_it_occurs() -> None:
    record = json.loads(json.dumps(network_record(benchmark())))
    total = record["total"]
    assert total["torch_contiguous_s"] == pytest.approx(0.12)
    assert total["mucudnn_channels_last_s"] == pytest.approx(0.048)
    assert total["speedup_contiguous"] == pytest.approx(3.0)
    assert total["speedup_channels_last"] == pytest.approx(1.25)
    assert total["speedup_best"] == pytest.approx(0.06 / 0.04)
    assert total["prediction_error"] == pytest.approx((0.05 + 0.125) / 2)


def test_network_record_has_both_formats_and_the_faster_one() -> None:
    problem = network_record(benchmark())["problems"][0]
    assert problem["memory_format"] == "contiguous"
    assert (problem["torch_contiguous_s"], problem["mucudnn_channels_last_s"]) == (0.06, 0.024)
    assert problem["formats"]["channels_last"]["predicted_s"] == 0.021
    assert problem["formats"]["channels_last"]["torch_noise"] == 0.01


def test_network_table_compares_both_formats() -> None:
    assert_as_stored("bench-network", network_table(benchmark()))


def test_layers_table_lists_sizes() -> None:
    assert_as_stored("layers", layers_table(load_source("vgg16", batch=8)))


def test_training_of_equal_models_has_no_difference() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(4 * 6 * 6, 10)
        )

    comparison = train_in_turns(model(), model(), labelled_batches(20, 8, (3, 8, 8)))
    assert comparison.difference.loss == 0
    assert comparison.difference.gradient == 0
    assert comparison.losses[-1] < comparison.losses[0]


def test_training_of_unequal_models_has_the_difference() -> None:
    models = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10)) for _ in range(2)]
    comparison = train_in_turns(*models, labelled_batches(2, 8, (3, 2, 2)))
    assert comparison.difference.loss > 0
    assert comparison.difference.gradient > 0


class Drifting(torch.nn.Linear):
    """Another function from its second call on."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * min(self.calls, 2)


def test_gradients_are_compared_in_the_first_step_where_weights_are_the_same() -> None:
    models = [torch.nn.Sequential(torch.nn.Flatten(), layer) for layer in (torch.nn.Linear(12, 10), Drifting(12, 10))]
    models[1].load_state_dict(models[0].state_dict())
    comparison = train_in_turns(*models, labelled_batches(3, 8, (3, 2, 2)))
    assert comparison.difference.loss > 1e-3
    assert comparison.difference.gradient == 0


def test_errors_of_gradients_are_those_of_rounding() -> None:
    torch.manual_seed(1)
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(144, 10)
    model = torch.nn.Sequential(*layers)
    rough = copy.deepcopy(model)
    for parameter in rough.parameters():
        parameter.data *= 1.001
    errors = train_in_turns(model, rough, labelled_batches(2, 8, (3, 8, 8))).errors
    assert 0 < errors.torch < 1e-5
    assert errors.mucudnn > 1e-4


def test_training_table_prints_times_differences_and_errors() -> None:
    differences = Difference(1e-6, 3e-5), Difference(2e-6, 4e-5)
    comparison = TrainingComparison(0.5, 0.25, (2.3, 1.1), *differences, GradientErrors(5e-7, 6e-7))
    assert_as_stored("demo", training_table(comparison))


def test_an_empty_tuning_has_no_speedup_in_its_record() -> None:
    record = tuning_record(TableTuning("mynet", Config(), ENVIRONMENT, (), 1))
    assert record["total"]["speedup"] is None
    assert math.isclose(record["total"]["torch_s"], 0)
