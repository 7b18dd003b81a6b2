"""Any value at all, given to what users call: a record of plain values, or a message; never another exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.clock.machine import FORWARD
from support.effort import IS_FULL, how_many

from mucudnn.bench.sources.layers import Layer
from mucudnn.database.database import Database
from mucudnn.tuning.tuner import tune
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import MucudnnError
from mucudnn.words.problem import ITEM_BYTES, ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.task import Task
from mucudnn.words.units import format_bytes, format_seconds, parse_bytes, parse_seconds

pytestmark = pytest.mark.fuzz

NUMBERS = st.one_of(
    st.integers(),
    st.integers(1, 9),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30, 10**400, 10**5000, -(10**5000)]),
    st.floats(),
    st.booleans(),
    st.complex_numbers(),
    st.decimals() | st.fractions(),
)
NUMPYS = st.one_of(
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.floats(width=32).map(np.float32),
    st.booleans().map(np.bool_),
    st.lists(st.integers(-3, 9), max_size=3).map(np.array),
    st.integers(-3, 9).map(torch.tensor),
)
NAMES = st.sampled_from(
    [
        *(
            *Operation,
            *MemoryFormat,
            *BatchSizePolicy,
            *ITEM_BYTES,
            "FORWARD",
            "winograd-2x2",
            "",
            " ",
            "cpu",
            "cuda:9",
        ),
        *("none", "headroom", "64MiB", "64 MB", "1.5KiB", "9" * 400 + "TiB", "9" * 5000 + "B", "60s", "1e-9", "1e999s"),
        *("nan", "inf", "-1s", "~/x", "~nobody", ":memory:", "a\0b", "\ud800", "mps", "gpu", "cuda:9"),
    ]
)
TEXTS = st.text(max_size=9) | NAMES
SINGLE = st.one_of(
    NUMBERS,
    NUMPYS,
    TEXTS,
    NAMES.map(np.str_),
    st.binary(max_size=4),
    st.sampled_from([None, Operation.FORWARD, MemoryFormat.CHANNELS_LAST, torch.float32, torch.int8, int, np.int64]),
    st.sampled_from(
        [torch.device("cpu"), torch.channels_last, Path("x"), Path("~/x"), object(), ..., Config(), FORWARD]
    ),
)
VALUES = SINGLE | st.lists(SINGLE, max_size=3) | st.tuples(SINGLE, SINGLE) | st.dictionaries(TEXTS, SINGLE, max_size=2)
PLAIN = (str, int, float, bool, type(None), tuple, Operation, MemoryFormat, BatchSizePolicy, type(Path()), ConvProblem)

ARGUMENTS = ("problems", "batch_size", "config", "device", "progress", "names")


def few(number: int) -> Callable[[Any], Any]:
    """Of the 2,500 values the share of one test; in short a tenth, always the same."""
    return settings(
        max_examples=how_many(number // 10, number),
        deadline=None,
        derandomize=not IS_FULL,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def changes(kind: type, *others: str) -> st.SearchStrategy[dict[str, Any]]:
    """Arbitrary values for one or two of its fields."""
    names = st.sampled_from([*(field.name for field in fields(kind)), *others])
    return st.dictionaries(names, VALUES, min_size=1, max_size=2)


def made(make: Callable[[], Any]) -> Any:
    """What is made, if anything; ``MucudnnError``s alone may say that it cannot be, in text that can be shown."""
    try:
        return make()
    except MucudnnError as error:
        message = str(error)
    assert 0 < len(message.encode()) < 1000
    return None


def require_plain(record: Any) -> None:
    for field in fields(record):
        assert type(getattr(record, field.name)) in PLAIN, field.name
    assert hash(replace(record)) == hash(record)
    assert replace(record) == record
    json.dumps(asdict(record), default=str, allow_nan=False)


@few(700)
@given(changes(Config))
def test_configs(given_values: dict[str, Any]) -> None:
    config = made(lambda: Config(**given_values))
    if config is not None:
        require_plain(config)
        assert all(type(operation) is Operation for operation in config.operations)
        assert all(type(name) is str and name for name in config.algorithms or ())
        assert config.time_limit_s is None or 0 <= config.time_limit_s < float("inf")
        for size in (config.workspace_budget_bytes, config.cache_budget_bytes):
            assert size is None or (type(size) is int and 0 <= size < 2**63)


@few(700)
@given(changes(ConvProblem))
def test_problems(given_values: dict[str, Any]) -> None:
    problem = made(lambda: replace(FORWARD, **given_values))
    if problem is not None:
        require_plain(problem)
        assert type(problem.operation) is Operation
        assert type(problem.memory_format) is MemoryFormat
        for pair in (problem.stride, problem.padding, problem.dilation):
            assert tuple(map(type, pair)) == (int, int)
        most = problem.countable_samples()
        assert max(np.prod(problem.x_shape(most)), np.prod(problem.y_shape(most))) < 2**31


@few(300)
@given(changes(Task), changes(Layer), changes(MicroConfig))
def test_tasks_and_layers(task: dict[str, Any], layer: dict[str, Any], micro_config: dict[str, Any]) -> None:
    for make in (
        lambda: Task(**{"problem": FORWARD, "batch_size": 8} | task),
        lambda: Layer(**{"names": "a", "problem": FORWARD, "batch_size": 8} | layer),
        lambda: MicroConfig(**{"algorithm": "gemm", "micro_batch_size": 8} | micro_config),
    ):
        record = made(make)
        if record is not None:
            require_plain(record)


@few(100)
@given(VALUES)
def test_configurations(micro_configs: object) -> None:
    configuration = made(lambda: Configuration(micro_configs, 0.1, 0))  # type: ignore[arg-type]
    assert configuration is None or type(configuration.micro_configs) is tuple


@few(400)
@given(VALUES)
def test_bytes_and_seconds(value: Any) -> None:
    size = made(lambda: parse_bytes(value))
    assert size is None or (type(size) is int and 0 <= size < 2**63)
    assert format_bytes(size)
    seconds = made(lambda: parse_seconds(value))
    assert seconds is None or (type(seconds) is float and 0 <= seconds < float("inf"))
    assert seconds is None or format_seconds(seconds)


@few(300)
@given(st.dictionaries(st.sampled_from(ARGUMENTS), VALUES, min_size=1))
def test_arguments_of_tune(arguments: dict[str, Any]) -> None:
    """Nothing is measured: the backward pass, which alone is asked for, is not among the problems."""
    usual = {"problems": [FORWARD], "batch_size": 8, "config": Config(operations="backward_data")}  # type: ignore[arg-type]
    if isinstance(arguments.get("config"), Config) or arguments.get("config", 0) is None:
        del arguments["config"]
    with Database(":memory:") as database:
        made(lambda: tune(**usual | arguments, database=database))


def test_the_values_reach_both_outcomes() -> None:
    """Else the tests above would hold for a function that refuses everything."""
    for given_values in ({"operations": "forward"}, {"algorithms": np.str_("gemm")}, {"time_limit": Fraction(1, 2)}):
        assert made(lambda given_values=given_values: Config(**given_values)) is not None
    assert made(lambda: Config(time_limit=Decimal(1))) is None  # type: ignore[arg-type]
