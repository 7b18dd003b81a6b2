"""Tables and records of tunings and layers: seconds inside, milliseconds and MiB where it is printed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.clock.machine import ENVIRONMENT as FAKE_ENVIRONMENT
from support.clock.machine import FORWARD
from support.snapshots import assert_as_stored, printed

from mucudnn.bench.results.tuning_report import account_in_words, tuning_record, tuning_table
from mucudnn.bench.sources.layers import Layer, LayerTable, load_source
from mucudnn.bench.sources.table_tuning import TableTuning, TunedLayer, of_table, table_tasks, table_with_headroom
from mucudnn.cli.layers import layers_table
from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Comparison, Configuration, Environment, Failure, Measurement, MicroConfig
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.tuning.replay import SelectedMeasurements, replay

MIB = 2**20
TABLE = LayerTable("mynet", (Layer("one", FORWARD, 8, 2), Layer("two", replace(FORWARD, k=3), 8, 1)))


ENVIRONMENT = Environment("a CPU", "AVX2", 2, "2.13.0", "oneDNN 3.12.0", "avx2")
PROBLEM = ConvProblem(Operation.FORWARD, 64, 56, 56, 64, 3, 3, padding=(1, 1))
CHOSEN = Configuration((MicroConfig("winograd-4x4", 8),) * 4, time_s=0.021, workspace_bytes=3 << 20)


def tuned(baseline_s: float = 0.06, time_s: float = 0.02) -> TunedProblem:
    return TunedProblem(PROBLEM, 32, CHOSEN, baseline_s, time_s, 2e-6, "faster than torch")


def table_tuning(wanted: int = 2) -> TableTuning:
    rows = (TunedLayer(("conv1",), 3, tuned()), TunedLayer(("conv2",), 1, tuned(0.02, 0.02)))
    return TableTuning("mynet", Config(), ENVIRONMENT, rows, wanted)


def test_tuning_table_has_a_row_for_each_operation_and_totals() -> None:
    assert_as_stored("tune", tuning_table(table_tuning()))


def test_a_slower_choice_has_its_reason_in_the_table() -> None:
    """Torch's own needs 100 MiB, and one layer of two has a limit below."""
    own = Measurement(MicroConfig(TORCHS_OWN, 32), 0.0, 0.02, 0, 100 << 20, 0.0)
    slower = replace(tuned(0.02, 0.06), measurements=(own,), limit_bytes=64 << 20)
    rows = (TunedLayer(("conv1",), 1, slower), TunedLayer(("conv2",), 1, tuned()))
    lines = printed(tuning_table(TableTuning("mynet", Config(), ENVIRONMENT, rows, 2))).splitlines()
    assert "why slower" in lines[2]
    assert ["PyTorch needs 100 MiB, over the limit" in line for line in lines if "conv" in line] == [True, False]


def test_where_pytorchs_own_is_too_slow_to_measure_the_table_says_more_than() -> None:
    slow = Failure(MicroConfig(TORCHS_OWN, 32), "it is too slow to measure", least_s=3.0)
    unmeasured = replace(tuned(), baseline_s=None, failures=(slow,))
    rows = (TunedLayer(("conv1",), 2, unmeasured), TunedLayer(("conv2",), 1, tuned()))
    lines = printed(tuning_table(TableTuning("mynet", Config(), ENVIRONMENT, rows, 2))).splitlines()
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if "conv1" in line or "total" in line]
    assert [{">3000.00", "20.00", ">150.00×"} <= {*cells[0]}, {">6060.00", "60.00", ">101.00×"} <= {*cells[1]}] == [
        True
    ] * 2


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


def test_layers_table_lists_sizes() -> None:
    assert_as_stored("layers", layers_table(load_source("vgg16", batch=8)))


def test_in_the_headroom_each_module_of_a_network_has_its_own_limit() -> None:
    table, limits = table_with_headroom("squeezenet", batch=2, input_shape=(3, 32, 32))
    config = Config(workspace_limit="headroom")
    tasks = table_tasks(table, config, limits)
    assert [task.limit_bytes for task in tasks] == [
        min(limits[name, problem.operation] for name in layer.names)
        for layer, problem in table.problems(config.operations)
    ]
    assert len({task.limit_bytes for task in tasks}) > 10
    assert all(task.in_headroom for task in tasks)


def replayed(**bounds: object) -> TableTuning:
    """Torch takes 100 ms, ``small`` 80 ms with 10 MiB, ``large`` 50 ms with 100 MiB, in each of the layers."""
    config = Config(operations=(Operation.FORWARD,), **bounds)  # type: ignore[arg-type]
    costs = {"native": (0.1, 0), "small": (0.08, 10 * MIB), "large": (0.05, 100 * MIB)}
    measured = [Measurement(MicroConfig(a, 8), 0.0, step_s, 0, size, 1e-7) for a, (step_s, size) in costs.items()]
    runs = {(m.micro_config,): Comparison(0.1, m.step_s, 0.0) for m in measured}
    tasks = table_tasks(TABLE, config)
    stored = SelectedMeasurements(
        FAKE_ENVIRONMENT, dict.fromkeys(costs, 1), dict.fromkeys(tasks, measured), dict.fromkeys(tasks, runs)
    )
    return of_table(TABLE, replay(tasks, config, stored))


def test_under_a_limit_each_problem_has_an_account() -> None:
    found = replayed(workspace_limit="10MiB")
    one, two = (row.tuned.account for row in found.rows)
    assert one is not None
    assert two is not None
    assert [str(account.configuration) for account in (one, two)] == ["small 8", "small 8"]
    assert (one.measurements, one.front_size, one.gap) == (3, 3, 0.0)
    text = account_in_words(found)
    assert "2 problems, each solved under its own limit: predicted total 240 ms, the least" in text  # one occurs twice
    assert "6 desirable configurations from 6 measurements" in text
    record = json.loads(json.dumps(tuning_record(found)))
    assert [account["objective_s"] for account in record["accounts"]] == pytest.approx([0.08, 0.08])
    assert record["division"] is None
