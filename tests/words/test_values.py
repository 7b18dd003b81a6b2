"""What users give becomes the one type that each value has, or is refused: in every record, by the same rules."""

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
from mucudnn.bench.sources.models import load_model
from mucudnn.database import schema
from mucudnn.running.devices import largest_batch_size
from mucudnn.solver.policies import BatchSizePolicy
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MOST_ELEMENTS, MOST_SAMPLES, ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Configuration, MicroConfig, WithEpilogue
from mucudnn.words.task import Task
from mucudnn.words.values import LARGEST, flag, pair, real, shown, whole

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


@pytest.mark.parametrize(
    "value",
    [
        True,
        np.True_,
        torch.tensor(True),
        4.0,
        np.float32(4),
        "4",
        b"4",
        None,
        [4],
        np.array([4]),
        np.int64,
        Fraction(4),
    ],
)
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"^c is .*; it must be a whole number$"):
        whole(value, "c")


def test_bounds_are_inclusive_and_named() -> None:
    assert [whole(n, "n", 1, 3) for n in (1, 3)] == [1, 3]
    for n, bound in ((0, "at least 1"), (4, "at most 3"), (10**5000, "at most 3")):
        with pytest.raises(InvalidInputError, match=bound):
            whole(n, "n", 1, 3)


@pytest.mark.parametrize("value", [2, [2, 2], np.array([2, 2]), torch.Size([2, 2]), np.int64(2), (2, np.int8(2))])
def test_one_number_is_a_pair_of_it(value: object) -> None:
    assert pair(value, "stride", 1, 9) == (2, 2)
    assert all(type(number) is int for number in pair(value, "stride", 1, 9))


@pytest.mark.parametrize(
    "value", [(2,), (2, 2, 2), (), "22", "2", (2, 2.0), (True, 2), {2, 3}, {2: 2, 3: 3}, None, np.ones((2, 2), int)]
)
def test_what_is_no_pair_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"^stride is .*; it must be one or two whole numbers"):
        pair(value, "stride", 1, 9)


def test_only_true_and_false_are_flags() -> None:
    assert [flag(value, "f") for value in (True, False, np.True_, np.False_)] == [True, False, True, False]
    for value in ("False", "", 0, 1, None, np.int8(1)):
        with pytest.raises(InvalidInputError, match="it must be True or False"):
            flag(value, "f")


def test_numbers_are_finite_floats() -> None:
    assert [type(real(value, "x")) for value in (1, 1.5, np.float32(1.5), Fraction(1, 2))] == [float] * 4
    for value in (float("nan"), float("inf"), -np.inf, 10**400, True, "1.5", None, 1j):
        with pytest.raises(InvalidInputError, match="it must be a finite number"):
            real(value, "x")


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operation": "sideways"}, "operation is 'sideways'; allowed are forward, backward_data, backward_filter"),
        ({"memory_format": torch.channels_last}, "memory_format is torch.channels_last; allowed are contiguous"),
        ({"dtype": torch.int8}, "dtype is torch.int8; allowed are float64"),
        ({"c": True}, "c is True; it must be a whole number"),
        ({"h": 9.0}, "h is 9.0; it must be a whole number"),
        ({"k": 10**30}, f"k is {10**30}; it must be at most {MOST_ELEMENTS}"),
        ({"stride": (1,)}, r"stride is \(1,\); it must be one or two whole numbers"),
    ],
)
def test_what_is_no_problem_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        replace(MEANT, **change)


def test_copies_and_pickles_are_equal() -> None:
    for record in (MEANT, Config(operations="forward"), Task(MEANT, 2), Configuration([MicroConfig("a", 1)], 1, 2)):  # type: ignore[arg-type]
        assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record


def test_operands_of_one_sample_are_countable() -> None:
    """Some libraries count elements in 32 bits, so do some of our own loops."""
    side = 2**15
    assert ConvProblem(Operation.FORWARD, 1, side, side, 1, 1, 1).countable_samples() == 1
    for change, what in (
        ({"c": 2}, "one sample of x has 2147483648 elements"),
        ({"k": 2}, "one sample of y has 2147483648 elements"),
        ({"c": side * 2, "k": side, "h": 1, "w": 1}, "w has 2147483648 elements"),
        ({"h": 1, "padding": (2**30, 0), "stride": (2**30, 2**15)}, "a padded column of x has 2147483649 elements"),
    ):
        sizes: dict[str, Any] = {"c": 1, "h": side, "w": side, "k": 1, "r": 1, "s": 1} | change
        with pytest.raises(InvalidInputError, match=f"{what}; at most {MOST_ELEMENTS} are allowed"):
            ConvProblem(Operation.FORWARD, **sizes)


def test_batches_have_an_upper_bound() -> None:
    problem = ConvProblem(Operation.FORWARD, 3, 224, 224, 64, 3, 3, padding=1)  # type: ignore[arg-type]
    assert problem.countable_samples() == MOST_ELEMENTS // (64 * 224 * 224)
    assert largest_batch_size(problem, "cpu") == problem.countable_samples()
    assert largest_batch_size(problem, "cuda") == largest_batch_size(FORWARD, "cpu") == MOST_SAMPLES
    for n in (MOST_SAMPLES + 1, 10**30, 0, 1.5, "2", True, None):
        with pytest.raises(InvalidInputError, match=r"^batch_size is "):
            Task(FORWARD, n)  # type: ignore[arg-type]


# Other records


@pytest.mark.parametrize(
    "make",
    [
        lambda: Task(FORWARD, np.int64(8), np.int64(64), np.int8(2), np.str_("a"), np.False_),  # type: ignore[arg-type]
        lambda: Layer(np.str_("a"), FORWARD, np.int64(8), np.int8(2), np.True_),  # type: ignore[arg-type]
        lambda: MicroConfig(np.str_("gemm"), np.int64(8)),  # type: ignore[arg-type]
        lambda: WithEpilogue(np.str_("ReLU"), np.True_),  # type: ignore[arg-type]
        lambda: Configuration([MicroConfig("gemm", 8)], np.float64(0.1), np.int64(8)),  # type: ignore[arg-type]
    ],
)
def test_records_hold_plain_values(make: Any) -> None:
    record = make()
    plain = {str, int, float, bool, tuple, ConvProblem, NoneType}
    assert set(types_of(record).values()) <= plain
    assert isinstance(hash(record), int)
    json.dumps(asdict(record))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Task("forward", 8), "problem is 'forward'; it must be a ConvProblem"),
        (lambda: Task(FORWARD, 1.5), "batch_size is 1.5"),
        (lambda: Task(FORWARD, 8, -1), "limit_bytes is -1"),
        (lambda: Task(FORWARD, 8, LARGEST + 1), "limit_bytes is .* at most"),
        (lambda: Task(FORWARD, 8, count=0), "count is 0"),
        (lambda: Task(FORWARD, 8, name=3), "name is 3; it must be text"),
        (lambda: Task(FORWARD, 8, in_headroom="no"), "in_headroom is 'no'"),
        (lambda: Task(FORWARD, 8, epilogue="ReLU"), "epilogue is 'ReLU'"),
        (lambda: Task(FORWARD, 8, in_headroom=True, epilogue=WithEpilogue("ReLU")), "epilogue is 'with ReLU'; only"),
        (lambda: Task(MEANT, 8, epilogue=WithEpilogue("ReLU")), "epilogue is 'with ReLU'; only a forward"),
        (lambda: WithEpilogue("GELU"), "activation is 'GELU'"),
        (lambda: WithEpilogue(), "has neither"),
        (lambda: Layer("a", FORWARD, MOST_SAMPLES + 1), "batch_size is"),
        (lambda: MicroConfig("gemm", 0), "micro_batch_size is 0"),
        (lambda: Configuration("gemm", 0.1, 0), "micro_config is 'gemm'; it must be a MicroConfig"),
    ],
)
def test_records_refuse_other_values(make: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_operations_formats_and_dtypes_of_tables_may_be_text() -> None:
    table = LayerTable("here", (Layer("a", FORWARD, 1, input_needs_gradient=False),))
    assert table.problems(["backward_data", "forward"]) == [(table.layers[0], FORWARD)]  # type: ignore[list-item]
    (layer, *_) = load_source("alexnet", dtype=torch.float64, memory_format="channels_last").layers  # type: ignore[arg-type]
    assert layer.problem.dtype == "float64"
    assert layer.problem.memory_format is MemoryFormat.CHANNELS_LAST
    with pytest.raises(InvalidInputError, match="dtype is 'int8'"):
        load_model("alexnet", dtype="int8")
    for shape in ((3, 8), "3x8x8", 3, (3, 0, 8), (3.0, 8, 8)):
        with pytest.raises(InvalidInputError, match="input shape"):
            load_source("alexnet", input_shape=shape)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"operations": ()}, "operations is empty"),
        ({"operations": "sideways"}, "one of operations is 'sideways'; allowed are forward"),
        ({"algorithms": ()}, r"algorithms is empty.*mucudnn doctor lists them.*native"),
        ({"algorithms": ""}, "algorithms is empty"),
        ({"algorithms": ["gemm", ""]}, "has an empty name"),
        ({"algorithms": 3}, "one of algorithms is 3; it must be text"),
        ({"policy": 1}, "policy is 1"),
        ({"deterministic": "False"}, "deterministic is 'False'; it must be True or False"),
        ({"strict": 1}, "strict is 1; it must be True or False"),
        ({"time_limit": True}, "time_limit: the time in seconds is True"),
        ({"time_limit": -1}, "time_limit: time -1 is negative"),
        ({"max_relative_error": "1e-5"}, "max_relative_error is '1e-5'; it must be a finite number"),
        ({"max_relative_error": 0}, "max_relative_error is 0; it must be at least 2.2"),
        ({"workspace_limit": 64.0}, "workspace_limit: the number of bytes is 64.0"),
        ({"workspace_limit": "9" * 400 + "MiB"}, "workspace_limit: size .* is more than"),
        ({"workspace_budget": "headroom"}, "workspace_budget: size 'headroom'"),
        ({"cache_budget": True}, "cache_budget: the number of bytes is True"),
        ({"database": 123}, "database is 123.*name a file, or None"),
        ({"database": ""}, "database is ''"),
        ({"database": "a\0b"}, "database is 'a.*b'"),
        ({"database": "~nobody-of-this-name/x"}, "database is '~nobody"),
    ],
)
def test_configs_refuse_other_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Config(**given)


@pytest.mark.parametrize("value", [torch.ones(2, device="meta"), torch.ones(2).to_sparse()], ids=["meta", "sparse"])
def test_tensors_without_values_are_refused_in_words(value: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match="stride is tensor"):
        ConvProblem("forward", 4, 3, 3, 4, 1, 1, stride=value)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="time_limit: the time in seconds is tensor"):
        Config(time_limit=value)  # type: ignore[arg-type]
