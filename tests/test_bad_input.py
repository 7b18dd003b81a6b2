"""Tables of bad input with the message that it must get: values, records, files, models and command lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clock.machine import FORWARD
from support.command_line import HEADING, commands, fail

from mucudnn.bench.sources.layers import Layer, load_source
from mucudnn.bench.sources.models import load_model
from mucudnn.cli.scale import parse_bandwidth
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, MucudnnError
from mucudnn.core.problem import MOST_ELEMENTS, MOST_SAMPLES, ConvProblem
from mucudnn.core.records import Configuration, MicroConfig, Task
from mucudnn.core.values import LARGEST, flag, parse_bytes, parse_seconds, real, sizes, whole

NINES = "9" * 5000
META, SPARSE = torch.ones(2, device="meta"), torch.ones(2).to_sparse()


def problem(**change: Any) -> ConvProblem:
    return ConvProblem(**{"operation": "forward", "c": 4, "h": 9, "w": 8, "k": 6, "r": 3, "s": 2} | change)


def large(**change: Any) -> ConvProblem:
    """One sample of x and of y has almost as many elements as are allowed."""
    return problem(**{"c": 1, "h": 2**15, "w": 2**15, "k": 1, "r": 1, "s": 1} | change)


def config(**given: Any) -> Config:
    return Config(**given)


def in_range(value: Any) -> int:
    return whole(value, "n", 1, 3)


def stride(value: Any) -> tuple[int, int]:
    return sizes(value, "stride", 2, 1, 9)


def in_records(**fields: Any) -> object:
    """Make the record that has a field of this name."""
    (name,) = fields
    if name in ("limit_bytes", "count", "name", "in_headroom", "batch_size", "problem"):
        return Task(**{"problem": FORWARD, "batch_size": 8} | fields)
    if name == "micro_configs":
        return Configuration(fields[name], 0.1, 0)
    return MicroConfig("gemm", **fields)


# What is called, with which values, and what every one of their messages has in it.
VALUES: tuple[tuple[Callable[[Any], object], tuple[Any, ...], str], ...] = (
    (
        lambda value: whole(value, "c"),
        (True, np.True_, torch.tensor(True), 4.0, np.float32(4), "4", b"4", None, [4], np.int64, Fraction(4)),
        "it must be a whole number",
    ),
    (in_range, (0, -1), "at least 1"),
    (in_range, (4, 10**5000), "at most 3"),
    (
        stride,
        (
            (2,),
            (2, 2, 2),
            (),
            "22",
            (2, 2.0),
            (True, 2),
            {2, 3},
            {2: 2, 3: 3},
            None,
            np.ones((2, 2), int),
            META,
            SPARSE,
        ),
        "it must be one or two whole numbers",
    ),
    (lambda value: flag(value, "f"), ("False", "", 0, 1, None, np.int8(1)), "it must be True or False"),
    (lambda value: real(value, "x"), (nan, -np.inf, 10**400, True, "1.5", None, 1j), "it must be a finite number"),
    (parse_bytes, ("64MB",), "'64MB' is ambiguous: write 64MiB (powers of 1024) or 64000000B"),
    (parse_bytes, ("64", "0.5"), " has no unit"),
    (parse_bytes, ("-1", "lots", "", "٦٤MiB", "1e30TiB", f"{NINES}B"), "is not understood; write a number and a unit"),
    (parse_bytes, ("64 parsecs",), "unknown unit 'parsecs'"),
    (parse_bytes, (True, 64.0), "it must be a whole number"),
    (parse_bytes, (-1,), "the number of bytes is -1; it must be at least 0"),
    (parse_bytes, (2**63,), f"it must be at most {2**63 - 1}"),
    (parse_bytes, (f"{2**63}B", "8388608TiB", f"{'9' * 400}MiB", f"{'9' * 400}MB"), f"is more than {2**63 - 1} bytes"),
    (parse_seconds, ("soon", "-1s", "3 days", "", "nan", "inf", "1e400s", "٣s", NINES, -1), "60s, 2min or 500ms"),
    (parse_seconds, (nan, inf, True, 10**400, 1j, b"60s", META), "it must be a finite number"),
    (
        parse_bandwidth,
        ("25GB", "25/s", "GB/s", "0GB/s", "none", "-1GB/s", "1 parsec/s", f"{'9' * 400}GB/s"),
        "write for example 25GB/s",
    ),
)

# What is called, with which argument of which value, and its message.
ARGUMENTS: tuple[tuple[Callable[..., object], dict[str, Any], str], ...] = (
    (problem, {"operation": "sideways"}, "'sideways'; allowed are forward, backward_data, backward_filter"),
    (problem, {"memory_format": torch.channels_last}, "memory_format is torch.channels_last; allowed are contiguous"),
    (problem, {"dtype": torch.int8}, "dtype is torch.int8; allowed are float64"),
    (problem, {"c": 0}, "c is 0; it must be at least 1"),
    (problem, {"c": True}, "c is True; it must be a whole number"),
    (problem, {"k": 10**30}, f"k is {10**30}; it must be at most {MOST_ELEMENTS}"),
    (problem, {"stride": (0, 1)}, "stride is (0, 1)"),
    (problem, {"padding": (0, -1)}, "padding is (0, -1)"),
    (problem, {"dilation": (0, 1)}, "dilation is (0, 1)"),
    (problem, {"groups": 4}, "groups is 4; it must divide C=4 and K=6"),
    (problem, {"r": 10}, "the filter covers 10x2 but the padded input is only 9x8"),
    (large, {"c": 2}, f"one sample of x has 2147483648 elements; at most {MOST_ELEMENTS} are allowed"),
    (large, {"k": 2}, "one sample of y has 2147483648 elements"),
    (large, {"c": 2**16, "k": 2**15, "h": 1, "w": 1}, "w has 2147483648 elements"),
    (large, {"h": 1, "padding": (2**30, 0), "stride": (2**30, 2**15)}, "a padded column of x has 2147483649 elements"),
    (in_records, {"problem": "forward"}, "problem is 'forward'; it must be a ConvProblem"),
    (in_records, {"batch_size": MOST_SAMPLES + 1}, "batch_size is"),
    (in_records, {"batch_size": 1.5}, "batch_size is 1.5"),
    (in_records, {"limit_bytes": -1}, "limit_bytes is -1"),
    (in_records, {"limit_bytes": LARGEST + 1}, "at most"),
    (in_records, {"count": 0}, "count is 0"),
    (in_records, {"name": 3}, "name is 3; it must be text"),
    (in_records, {"in_headroom": "no"}, "in_headroom is 'no'"),
    (in_records, {"micro_batch_size": 0}, "micro_batch_size is 0"),
    (in_records, {"micro_configs": "gemm"}, "micro_config is 'gemm'; it must be a MicroConfig"),
    (config, {"operations": ()}, "operations is empty"),
    (config, {"operations": "sideways"}, "one of operations is 'sideways'; allowed are forward"),
    (config, {"algorithms": ()}, "algorithms is empty"),
    (config, {"algorithms": ""}, "algorithms is empty"),
    (config, {"algorithms": ["gemm", ""]}, "has an empty name"),
    (config, {"algorithms": 3}, "one of algorithms is 3; it must be text"),
    (config, {"policy": 1}, "policy is 1"),
    (config, {"deterministic": "False"}, "deterministic is 'False'; it must be True or False"),
    (config, {"time_limit": True}, "time_limit: the time in seconds is True"),
    (config, {"time_limit": -1}, "time_limit: time -1 is negative"),
    (config, {"keep_heap": "perhaps"}, "keep_heap"),
    (config, {"max_relative_error": "1e-5"}, "max_relative_error is '1e-5'; it must be a finite number"),
    (config, {"max_relative_error": 0}, "max_relative_error is 0; it must be at least 2.2"),
    (config, {"workspace_limit": 64.0}, "workspace_limit: the number of bytes is 64.0"),
    (config, {"workspace_limit": "9" * 400 + "MiB"}, "is more than"),
    (config, {"workspace_budget": "headroom"}, "workspace_budget: size 'headroom'"),
    (config, {"cache_budget": True}, "cache_budget: the number of bytes is True"),
    (config, {"database": 123}, "name a file, or None"),
    (config, {"database": ""}, "database is ''"),
    (config, {"database": "a\0b"}, "database is 'a"),
    (config, {"database": "~nobody-of-this-name/x"}, "database is '~nobody"),
    (load_source, {"source": "alexnt"}, "'alexnt'; did you mean alexnet? "),
    (load_source, {"source": "."}, "source is '.'"),
    (load_source, {"source": "missing.csv"}, "missing.csv cannot be read as a CSV file of layers: No such file"),
    (load_source, {"source": "alexnet", "batch": 0}, "batch is 0; it must be at least 1"),
    (load_source, {"source": "alexnet", "batch": 10**9}, "batch is 1000000000; it must be at most 1048576"),
    (load_source, {"source": "deepbench-train", "batch": 10**30}, f"batch is {10**30}; it must be at most"),
    (load_source, {"source": "deepbench-train", "batch": 1.5}, "batch is 1.5; it must be a whole number"),
    (load_source, {"source": "deepbench-train", "input_shape": (3, 8, 8)}, "deepbench-train has its own"),
    (load_source, {"source": "alexnet", "input_shape": (3, 8, 8)}, "alexnet cannot compute an input of 1x3x8x8"),
    *(
        (load_source, {"source": "alexnet", "input_shape": shape}, "input shape")
        for shape in ((3,), "3x8x8", 3, (3, 0, 8), (3.0, 8, 8))
    ),
    (load_source, {"source": "torch.nn:Identity"}, "give --input, for example --input 3x224x224"),
    (load_model, {"source": "alexnet", "dtype": "int8"}, "dtype is 'int8'"),
)

ROW = "a,4,8,8,4,3,3,1,1,1,1\n"
CSV_FILES = (
    ("", "line 1: no column c"),
    (HEADING.replace(",k,", ",kk,"), "line 1: no column k"),
    (HEADING.replace(",k,", ",k,colour,"), "line 1: unknown column 'colour'; allowed are c, h"),
    (HEADING.replace(",k,", ",k,k,"), "line 1: column k occurs more than once"),
    (HEADING, "has no convolution"),
    (HEADING + ROW + "b,4,8,eight,4,3,3,1,1,1,1\n", "line 3: w is 'eight'; write a whole number"),
    (HEADING + "a,4,8,8,4\n", "line 2: the number of values"),
    (HEADING + ROW.replace("\n", ",7\n"), "line 2: the number of values"),
    (HEADING + "a,4,8,8,4,11,11,1,1,1,1\n", "line 2: not a convolution: the filter covers 11x11 but the padded"),
    (HEADING + "a,999999999999,8,8,4,3,3,1,1,1,1\n", "line 2: c is 999999999999; it must be at most 2147483647"),
    (HEADING + "a,3,99999,99999,4,3,3,1,1,1,1\n", "one sample of y has 39999200004 elements; at most"),
    (HEADING + f"a,{NINES},8,8,4,3,3,1,1,1,1\n", "line 2: c is '999"),
    ("n," + HEADING + "0," + ROW, "line 2: n is 0; it must be at least 1"),
    ("count," + HEADING + "-2," + ROW, "line 2: count is -2; it must be at least 1"),
    (HEADING + '"a,4\n', "cannot be read as a CSV file"),
    ("c" * 1_000_000, "cannot be read as a CSV file of layers: field larger than field limit"),
    ("\0\xff", "cannot be read as a CSV file of layers"),
)

USERS = """
from torch import nn
class Exported(nn.Conv2d):
    def eval(self): raise NotImplementedError("Calling eval() is not supported")
def raises(): raise ValueError("out of ideas")
def leaves(): raise SystemExit(3)
def linear(): return nn.Linear(8, 8)
def number(): return 5
def wide(): return nn.Conv2d(4, 4, 3)
def narrow(): return nn.Conv2d(3, 4, 11)
def exported(): return Exported(3, 4, 3)
"""
MODELS = {
    "raises": "cannot be built: out of ideas (ValueError in ",
    "leaves": "cannot be built: it ended with exit status 3 (SystemExit in ",
    "missing": "cannot be built: there is no 'missing' in ",
    "linear": "has no convolution",
    "number": "gives int; it must give a torch.nn.Module",
    "wide": "cannot compute an input of 1x3x8x8",
    "narrow": "cannot compute an input of 1x3x8x8",
    "exported": "cannot be built: Calling eval() is not supported",
}

COMMAND_LINES = (
    ("layers alexnte", "'alexnte'; did you mean alexnet? allowed are alexnet, vgg16"),
    ("layers /dev/zero", "/dev/zero is not a regular file"),
    ("layers pipe.csv", "pipe.csv is not a regular file"),
    ("layers=", "'' is not a source; name a network"),
    ("layers alexnet --batch 0", "the number is 0; it must be at least 1"),
    (f"layers alexnet --batch {10**30}", f"{10**30}; it must be at most 2147483647"),
    ("layers smallest.csv --batch 1048577", "1048577; it must be at most 1048576"),
    ("layers no_such_module:make --input 3x8x8", "no_such_module"),
    ("layers os:make --input 224", "write for example 3x224x224"),
    ("layers alexnet --input 99999999x99999999x99999999", "cannot compute an input of 1x99999999x"),
    ("layers alexnet --input 9999999999x1x1", "write for example 3x224x224"),
    ("tune alexnet --policy some", "policy is 'some'; allowed are undivided, power-of-two, all"),
    ("tune alexnet --operations forward,sideways", "one of operations is 'sideways'; allowed are forward, backw"),
    ("tune alexnet --memory-format NCHW", "allowed are contiguous, channels_last"),
    ("tune alexnet --dtype int8", "'int8' is not one of 'float16', 'bfloat16', 'float32', 'float64'"),
    ("tune alexnet --workspace-limit 64MB", "write 64MiB (powers of 1024) or 64000000B (exactly)"),
    ("tune alexnet --time-limit soon", "write for example 60s"),
    ("tune alexnet --max-relative-error 0", "max_relative_error is 0.0; it must be at least 2.22"),
    ("tune alexnet --algorithms gem", "gem; this machine has native"),
    ("tune alexnet --algorithms=", "algorithms is empty or has an empty name; name some"),
    ("tune alexnet --device tpu", "'tpu'"),
    ("tune alexnet --device cuda", "is built without CUDA: install a CUDA build of torch"),
    ("tune alexnet --threads 0", "the number is 0; it must be at least 1"),
    ("tune alexnet --threads 10000", "10000; it must be at most 1024"),
    ("tune alexnet --json no/such/folder/out.json", "the folder no/such/folder does not exist; create it"),
    ("tune alexnet --json /", "/ is a folder; name a file"),
    ("tune alexnet --database=", "'' is empty; name a file"),
    ("tune alexnet --database /dev/null", "/dev/null is not a regular file"),
    ("tune users:wide --input 4x8x8 --operations backward-data", "has no backward_data to tune; choose"),
    ("scale alexnet --up-to 65537", "65537; it must be at most 65536"),
    ("database merge no.sqlite", "no.sqlite"),
    ("report nowhere", "nowhere/environment.json does not exist; name a folder that a benchmark wrote with --out"),
    ("report users.py", "'users.py' is a file"),
    ("report --pictures= nowhere", "'' is empty; name a folder"),
    ("frobnicate", "No such command 'frobnicate'"),
)
ODD = ("", " ", ",", "-1", "--", "1e999", "nan", "x", "٣", "\n", "[/red]", NINES, f"{NINES}x3x3", "9" * 30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files of all kinds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.version.cuda", None)
    os.mkfifo("pipe.csv")
    Path("smallest.csv").write_text(HEADING + "a,1,1,1,1,1,1,0,0,1,1\n")
    Path("users.py").write_text(USERS)
    return tmp_path


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def require_taken_or_refused(make: Callable[[], Any]) -> Any:
    """Return what is made, or None if it is refused in words that can be shown."""
    try:
        return make()
    except click.ClickException as error:
        message = error.format_message()
    except (MucudnnError, OSError) as error:  # the entry point prints both
        message = str(error)
    assert message.encode()
    return None


def test_values() -> None:
    for call, values, expected in VALUES:
        for value in values:
            message = message_of(partial(call, value))
            assert expected in message, (value, message)


def test_arguments(folder: Path) -> None:
    for call, arguments, expected in ARGUMENTS:
        message = message_of(partial(call, **arguments))
        assert expected in message, (arguments, message)


def test_files_of_layers(folder: Path) -> None:
    for text, expected in CSV_FILES:
        Path("layers.csv").write_text(text, "latin-1")
        message = message_of(partial(load_source, "layers.csv"))
        assert "layers.csv" in message
        assert expected in message, (text[:200], message)


def test_models(folder: Path) -> None:
    for name, expected in MODELS.items():
        message = message_of(partial(load_source, f"users:{name}", input_shape=(3, 8, 8)))
        assert message.startswith(f"users:{name} {expected}"), message


def test_command_lines(folder: Path) -> None:
    for line, expected in COMMAND_LINES:
        message = fail(*(line.split() if line != "layers=" else ("layers", "")))
        assert expected in message, (line, message)


def test_odd_values_of_every_option(folder: Path) -> None:
    for _, command in commands():
        options = [param for param in command.params if isinstance(param, click.Option) and not param.is_flag]
        for option, odd in product(options, ODD):
            require_taken_or_refused(partial(option.type_cast_value, click.Context(command), odd))


ANYTHING = st.one_of(
    st.integers() | st.floats() | st.booleans() | st.text(max_size=9) | st.none() | st.binary(max_size=3),
    st.sampled_from([10**400, np.int8(3), np.array([1, 2]), torch.tensor(2), torch.float32, object(), ..., Path("x")]),
    st.lists(st.integers(-1, 9) | st.text(max_size=3), max_size=3),
)


@settings(max_examples=100, derandomize=True)
@given(value=ANYTHING, data=st.data())
def test_anything_is_taken_or_refused_in_words(value: Any, data: st.DataObject) -> None:
    kind, make = data.draw(st.sampled_from([(Config, Config), (ConvProblem, problem), (Layer, replace)]))
    name = data.draw(st.sampled_from(sorted(kind.__dataclass_fields__)))
    layer = Layer("a", FORWARD, 8)
    record = require_taken_or_refused(
        lambda: replace(layer, **{name: value}) if kind is Layer else make(**{name: value})
    )
    if record is not None:
        assert hash(record) == hash(replace(record))
        assert record == replace(record)
