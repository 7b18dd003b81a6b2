"""Table and record of a network: sums count each convolution as often as it occurs."""

from __future__ import annotations

import json

import pytest
from support.snapshots import assert_as_stored

from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.contests.timing import MedianTime
from mucudnn.bench.suites.network.report import network_record, network_table
from mucudnn.bench.suites.network.result import FormatResult, NetworkBenchmark, ProblemResult
from mucudnn.running.environment import Environment
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Configuration, MicroConfig

ENVIRONMENT = Environment("a CPU", "AVX2", 2, "2.13.0", "oneDNN 3.12.0", "avx2")
PROBLEM = ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, padding=(1, 1))
LIMITS = MachineLimits(200e9, 25e9)
CHOSEN = Configuration((MicroConfig("winograd-4x4", 8),) * 4, time_s=0.021, workspace_bytes=3 << 20)


def tuned(baseline_s: float = 0.06, time_s: float = 0.02) -> TunedProblem:
    return TunedProblem(PROBLEM, 32, CHOSEN, baseline_s, time_s, 2e-6, "faster than torch")


def benchmark(limits: MachineLimits = LIMITS) -> NetworkBenchmark:
    formats = {
        MemoryFormat.CONTIGUOUS: FormatResult(MedianTime(0.06, 0.01), MedianTime(0.02, 0.02), tuned()),
        MemoryFormat.CHANNELS_LAST: FormatResult(MedianTime(0.03, 0.01), MedianTime(0.024, 0.02), tuned()),
    }
    problem = ProblemResult(("conv1",), Operation.FORWARD, 2, formats)
    return NetworkBenchmark("mynet", Config(), ENVIRONMENT, (problem,), 15, limits)


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


def test_time_over_the_bound_of_the_machine() -> None:
    record = json.loads(json.dumps(network_record(benchmark())))
    bound_s = PROBLEM.flops(32) / 200e9
    assert record["machine_limits"] == {"flops_per_s": 200e9, "bytes_per_s": 25e9}
    assert record["problems"][0]["formats"]["channels_last"]["over_bound"] == pytest.approx(0.024 / bound_s)
    assert record["total"]["over_bound"] == {"3x3": pytest.approx(0.02 / bound_s)}


def test_without_limits_there_is_no_bound() -> None:
    unknown = benchmark(MachineLimits())
    record = json.loads(json.dumps(network_record(unknown)))
    assert record["machine_limits"] is record["problems"][0]["formats"]["contiguous"]["over_bound"] is None
    assert record["total"]["over_bound"] == {}
    assert "bound" not in str(network_table(unknown).caption)


def test_network_table_compares_both_formats() -> None:
    assert_as_stored("bench-network", network_table(benchmark()))
