"""What is told of a headroom: rows, words, files and the drawing, where the right answer is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.clock.machine import ENVIRONMENT
from support.snapshots import assert_as_stored, printed

from mucudnn.bench.analyses.headroom import (
    draw_headroom,
    headroom_record,
    headroom_rows,
    headroom_table,
    in_words,
)
from mucudnn.bench.report.records import Record
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.bench.sources.table_tuning import TableTuning, module_by_module, of_table, table_tasks
from mucudnn.running.environment import Environment
from mucudnn.tracing.headroom import Headroom, headroom_limits
from mucudnn.tracing.training_step import ConvolutionCall, Event, MemoryTimeline
from mucudnn.tuning.replay import replay
from mucudnn.words.config import Config
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, Measurement, MicroConfig, WholeRun
from mucudnn.words.task import Task

MIB = 2**20
FORWARD = ConvProblem(Operation.FORWARD, c=2, h=8, w=8, k=2, r=1, s=1)
DATA, FILTER = (FORWARD.with_operation(o) for o in (Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER))
CONFIG = Config(workspace_limit="headroom")
CALLS = (
    ConvolutionCall("first", FORWARD, 4, 20 * MIB, 0),
    ConvolutionCall("second", FORWARD, 4, 40 * MIB, 2),
    ConvolutionCall("second", DATA, 4, 80 * MIB, 4),
    ConvolutionCall("second", FILTER, 4, 95 * MIB, 4),
    ConvolutionCall("first", FILTER, 4, 60 * MIB, 5),
)
LIVE = (20, 30, 40, 100, 95, 60)


class Stored:
    """Torch takes 100 ms, ``small`` 80 ms with 10 MiB, ``large`` 50 ms with 50 MiB."""

    environment: Environment = ENVIRONMENT

    def measurements(self, task: Task) -> Sequence[Measurement]:
        costs = {"native": (0.1, 2), "small": (0.08, 10), "large": (0.05, 50)}
        n = task.batch_size
        return [Measurement(MicroConfig(a, n), 0.0, s, 0, size * MIB, 1e-7) for a, (s, size) in costs.items()]

    def whole_run(self, task: Task, configuration: Configuration) -> WholeRun | None:
        return WholeRun(0.1, configuration.time_s, 0.0)


def headroom(calls: tuple[ConvolutionCall, ...] = CALLS) -> Headroom:
    events = tuple(Event("aten.op", mib * MIB) for mib in LIVE)
    timeline = MemoryTimeline(10 * MIB, events, calls)
    return Headroom(timeline, timeline.peak_bytes, headroom_limits(timeline, lambda problem, n: 0))


def tuned(of: Headroom, *layers: Layer, config: Config = CONFIG) -> TableTuning:
    table = module_by_module(LayerTable("mynet", layers))
    return of_table(table, replay(table_tasks(table, config, of.limits), config, Stored()))


FIRST = Layer("first", FORWARD, 4, input_needs_gradient=False)
SECOND = Layer("second", FORWARD, 4)


@pytest.fixture
def known() -> Headroom:
    return headroom()


@pytest.fixture
def tuning(known: Headroom) -> TableTuning:
    return tuned(known, FIRST, SECOND)


@pytest.fixture
def rows(known: Headroom, tuning: TableTuning) -> list[Record]:
    return headroom_rows(known, tuning)


def configurations(rows: list[Record]) -> list[str | None]:
    return [row["configuration"] for row in rows]


def test_rows_are_the_calls_with_configurations_within_their_limits(rows: list[Record]) -> None:
    assert [(row["layer"], row["operation"]) for row in rows] == [(call.name, call.operation) for call in CALLS]
    assert configurations(rows) == ["large 4", "large 4", "small 4", "native 4", "small 4"]
    assert all(row["in_use_bytes"] + row["workspace_bytes"] <= 100 * MIB for row in rows)
    assert [row["workspace_bytes"] // MIB for row in rows] == [50, 50, 10, 2, 10]


def test_torchs_workspace_is_cut_to_the_peak() -> None:
    """It was measured with a bias, which the call may not have, and exceeds the limit here."""
    known = headroom((replace(CALLS[3], in_use_bytes=99 * MIB),))
    (row,) = headroom_rows(known, tuned(known, SECOND))
    assert row["configuration"] == "native 4"
    assert row["workspace_bytes"] == row["limit_bytes"] < MIB


def test_modules_of_one_geometry_are_tuned_apart() -> None:
    layer = Layer(("one", "two", "one"), FORWARD, 4, count=3)
    assert [(one.name, one.count) for one in module_by_module(LayerTable("net", (layer,))).layers] == [
        *(("one", 2), ("two", 1))
    ]
    low, high = (ConvolutionCall(*call) for call in (("one", FORWARD, 4, 0, 0), ("two", FORWARD, 4, 85 * MIB, 2)))
    known = headroom((low, high))
    assert configurations(headroom_rows(known, tuned(known, layer))) == ["large 4", "small 4"]


def test_a_module_that_is_called_with_two_shapes_has_both_and_others_have_none() -> None:
    """Only the calls of the tuned module have a configuration."""
    smaller = replace(FORWARD, h=4, w=4)
    known = headroom((CALLS[0], replace(CALLS[0], problem=smaller, event=1), replace(CALLS[1], event=2)))
    rows = headroom_rows(known, tuned(known, FIRST, replace(FIRST, problem=smaller)))
    assert configurations(rows) == ["large 4", "large 4", None]


def test_operations_that_are_not_tuned_are_shown_without_a_configuration(known: Headroom) -> None:
    tuning = tuned(known, FIRST, SECOND, config=replace(CONFIG, operations=(Operation.FORWARD,)))
    rows = headroom_rows(known, tuning)
    assert configurations(rows) == ["large 4", "large 4", None, None, None]
    assert [row["workspace_bytes"] for row in rows[2:]] == [0, 0, 0]
    assert "200.00" in printed(headroom_table(known, tuning, rows))  # torch's time of those that are
    assert "2.00× as fast" in in_words(known, rows)


def test_table_words_and_files_agree(known: Headroom, tuning: TableTuning, rows: list[Record]) -> None:
    assert_as_stored("explain-headroom", headroom_table(known, tuning, rows), in_words(known, rows))
    record = json.loads(json.dumps(headroom_record(known, tuning, rows)))
    assert record["calls"] == rows
    assert record["peak_bytes"] == 100 * MIB
    assert record["config"]["workspace_limit"] == "headroom"
    assert [event["live_bytes"] for event in record["timeline"]["events"]] == [mib * MIB for mib in LIVE]


def test_workspaces_stand_on_the_bytes_in_use_and_end_below_the_peak(known: Headroom, rows: list[Record]) -> None:
    (axes,) = draw_headroom(known, "mynet", rows).axes
    free, used = ([*bars] for bars in axes.containers)
    for row, room, box in zip(rows, free, used, strict=True):
        assert box.get_y() == room.get_y() == row["in_use_bytes"] / MIB
        assert box.get_height() == row["workspace_bytes"] / MIB <= room.get_height()
        assert room.get_y() + room.get_height() == pytest.approx(100, abs=0.01)
