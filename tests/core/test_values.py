"""What users give becomes the one type that each value has: in every record, by the same rules."""

from __future__ import annotations

import copy
import json
import pickle
import sqlite3
from dataclasses import asdict, fields, replace
from enum import IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pytest
import torch
from support.clock.machine import FORWARD

from mucudnn.bench.sources.layers import Layer, LayerTable, load_source
from mucudnn.core.config import Config
from mucudnn.core.problem import MOST_ELEMENTS, MOST_SAMPLES, ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Configuration, MicroConfig, Task
from mucudnn.core.values import flag, real, shown, sizes, whole
from mucudnn.running.problems import largest_batch_size
from mucudnn.solver.reuse import BatchSizePolicy
from mucudnn.store import schema

SIZES: dict[str, Any] = {"c": 4, "h": 9, "w": 8, "k": 6, "r": 3, "s": 2}
MEANT = ConvProblem(
    Operation.BACKWARD_DATA,
    **SIZES,
    stride=(2, 2),
    padding=(1, 0),
    dtype="float64",
    memory_format=MemoryFormat.CHANNELS_LAST,
)


class Other(StrEnum):
    DATA = "backward_data"


class Number(IntEnum):
    FOUR = 4


def types_of(record: Any) -> dict[str, object]:
    return {field.name: type(getattr(record, field.name)) for field in fields(record)}


# Values


@pytest.mark.parametrize("value", [4, np.int8(4), np.uint64(4), np.array(4), torch.tensor(4), Number.FOUR])
def test_whole_numbers_are_ints(value: object) -> None:
    assert whole(value, "c") == 4
    assert type(whole(value, "c")) is int


def test_bounds_are_inclusive() -> None:
    assert [whole(n, "n", 1, 3) for n in (1, 3)] == [1, 3]


@pytest.mark.parametrize("value", [2, [2, 2], np.array([2, 2]), torch.Size([2, 2]), np.int64(2), (2, np.int8(2))])
def test_one_number_is_that_of_all_dimensions(value: object) -> None:
    assert sizes(value, "stride", 2, 1, 9) == (2, 2)
    assert all(type(number) is int for number in sizes(value, "stride", 2, 1, 9))


def test_flags_and_numbers_are_pythons() -> None:
    assert [flag(value, "f") for value in (True, False, np.True_, np.False_)] == [True, False, True, False]
    assert [type(real(value, "x")) for value in (1, 1.5, np.float32(1.5), Fraction(1, 2))] == [float] * 4


def test_what_is_shown_is_short() -> None:
    assert shown("a") == "'a'"
    assert shown(10**5000) == "a too long int"
    assert len(shown("9" * 5000)) < 120


# Problems


@pytest.mark.parametrize(
    "change",
    [
        {"operation": "backward_data"},
        {"operation": np.str_("backward_data")},
        {"operation": Other.DATA},
        {"memory_format": "channels_last"},
        {"dtype": torch.float64},
        {"dtype": "torch.float64"},
        {"dtype": np.str_("float64")},
        {"stride": 2},
        {"stride": np.array([2, 2])},
        {"padding": [1, 0]},
        {name: np.int64(size) for name, size in SIZES.items()},
    ],
)
def test_a_problem_is_the_same_however_it_is_given(change: dict[str, Any]) -> None:
    """A text that equals an operation took other branches, of which one wrote behind its buffer."""
    problem = replace(MEANT, **change)
    assert types_of(problem) == types_of(MEANT)
    assert (problem, hash(problem), repr(problem)) == (MEANT, hash(MEANT), repr(MEANT))
    assert problem.operation is Operation.BACKWARD_DATA
    assert json.dumps(asdict(problem)) == json.dumps(asdict(MEANT))


def test_rows_of_a_problem_are_numbers_and_texts() -> None:
    """SQLite stores a NumPy integer as bytes, under which nobody finds it again."""
    given: dict[str, Any] = {name: np.int64(size) for name, size in SIZES.items()}
    problem = ConvProblem("forward", **given, dilation=np.array([1, 1]))  # type: ignore[arg-type]
    values = [*schema.named(problem).values()]
    connection = sqlite3.connect(":memory:")
    stored = connection.execute(f"SELECT {', '.join('?' * len(values))}", values).fetchone()
    connection.close()
    assert schema.problem_from(stored) == problem


def test_copies_and_pickles_are_equal() -> None:
    for record in (MEANT, Config(operations="forward"), Task(MEANT, 2), Configuration([MicroConfig("a", 1)], 1, 2)):  # type: ignore[arg-type]
        assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record


def test_batches_have_an_upper_bound() -> None:
    problem = ConvProblem(Operation.FORWARD, 3, 224, 224, 64, 3, 3, padding=1)  # type: ignore[arg-type]
    assert problem.countable_samples() == MOST_ELEMENTS // (64 * 224 * 224)
    assert largest_batch_size(problem, "cpu") == problem.countable_samples()
    assert largest_batch_size(problem, "cuda") == largest_batch_size(FORWARD, "cpu") == MOST_SAMPLES


# Other records


@pytest.mark.parametrize(
    "make",
    [
        lambda: Task(FORWARD, np.int64(8), np.int64(64), np.int8(2), np.str_("a"), np.False_),  # type: ignore[arg-type]
        lambda: Layer(np.str_("a"), FORWARD, np.int64(8), np.int8(2), np.True_),  # type: ignore[arg-type]
        lambda: MicroConfig(np.str_("gemm"), np.int64(8)),  # type: ignore[arg-type]
        lambda: Configuration([MicroConfig("gemm", 8)], np.float64(0.1), np.int64(8)),  # type: ignore[arg-type]
    ],
)
def test_records_hold_plain_values(make: Any) -> None:
    record = make()
    plain = {str, int, float, bool, tuple, ConvProblem, NoneType}
    assert set(types_of(record).values()) <= plain
    assert isinstance(hash(record), int)
    json.dumps(asdict(record))


def test_operations_formats_and_dtypes_of_tables_may_be_text() -> None:
    table = LayerTable("here", (Layer("a", FORWARD, 1, input_needs_gradient=False),))
    assert table.problems(["backward_data", "forward"]) == [(table.layers[0], FORWARD)]  # type: ignore[list-item]
    (layer, *_) = load_source("alexnet", dtype=torch.float64, memory_format="channels_last").layers  # type: ignore[arg-type]
    assert layer.problem.dtype == "float64"
    assert layer.problem.memory_format is MemoryFormat.CHANNELS_LAST


# Configs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"operations": None}, tuple(Operation)),
        ({"operations": "forward"}, (Operation.FORWARD,)),
        ({"operations": ["forward", Operation.FORWARD]}, (Operation.FORWARD,)),
        ({"algorithms": "winograd-2x2"}, ("winograd-2x2",)),
        ({"algorithms": ["gemm", "fft", "gemm"]}, ("gemm", "fft")),
        ({"algorithms": np.array(["gemm", "fft"])}, ("gemm", "fft")),
        ({"algorithms": None}, None),
        ({"policy": "all"}, BatchSizePolicy.ALL),
        ({"deterministic": np.True_}, True),
        ({"time_limit": np.float32(0.5)}, 0.5),
        ({"time_limit": "60s"}, "60s"),
        ({"max_relative_error": np.float64(1e-5)}, 1e-5),
        ({"workspace_limit": np.int64(64)}, 64),
        ({"workspace_limit": "headroom"}, "headroom"),
        ({"cache_budget": None}, None),
        ({"database": "~/x.sqlite"}, Path.home() / "x.sqlite"),
        ({"database": ":memory:"}, Path(":memory:")),
    ],
)
def test_configs_have_one_type_for_each_value(given: dict[str, Any], expected: object) -> None:
    (name,) = given
    config = Config(**given)
    value = getattr(config, name)
    assert value == expected
    assert type(value) is type(expected)
    assert replace(config) == config
    assert hash(replace(config)) == hash(config)
