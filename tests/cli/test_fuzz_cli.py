"""Random commands, options and values: a message or a result, status 0, 2 or 130, never a traceback nor a lost file."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.command_line import HEADING, commands, invoke
from support.effort import IS_FULL, how_many
from support.ranks.alone import group_of_one
from torch import nn

from mucudnn.bench.sources import layers, models, networks
from mucudnn.bench.sources.layers import TABLES
from mucudnn.cli.bench import data_parallel
from mucudnn.cli.main import main
from mucudnn.cli.run import Program
from mucudnn.distributed.link import freeing_what_failed
from mucudnn.terminal.files import InputFile, OutputFile, OutputFolder

pytestmark = [pytest.mark.fuzz, pytest.mark.slow]

NAMES = {"t.csv": "t.csv", "link.csv": "t.csv", "profile.csv": "profile.csv", "junk.json": "junk.json"}
NAMES |= {f"users:{factory}": "users.py" for factory in ("make", "leave", "stop", "raise_")} | {"users.py": "users.py"}
SOURCES = ("t.csv", "t.csv", "t.csv", "users:make", "alexnet")
NO_SOURCES = ("twice.csv", "empty.csv", "users:leave", "users:stop", "users:raise_", "users", "folder", "pipe.csv", ".")
OTHERS = ("/dev/zero", "/dev/full", "/dev/null", "missing/out", "circle", "x" * 300, "a:b:c", ":", "users:", ":make")
OUTPUTS = ("out.json", "out.csv", "out.png", "t.csv", "own.sqlite", "own.sqlite-wal", "link.csv", "users.py", "folder")
FILES = ("own.sqlite", "profile.csv", "new.sqlite", "t.csv", "junk.json", "broken.sqlite", *OUTPUTS)
# Whatever is a small number or none, since a large one that is allowed would take its time.
EDGES = (
    *("", " ", ",", "0", "-1", "--", "-", "1e3", "1.5", "3x", "x", "0x10", "1_0", "٣", "²", "１"),
    *("nan", "inf", "-inf", "NaN", "Infinity", "None", "true", "\udcff", "\n", "μ×", "[/red]"),
    *(
        "1" + 30 * "0",
        "9" * 5000,
        "2147483648",
        "-9223372036854775809",
        "99999999x99999999x99999999",
        "%s%n",
        "~",
        "$HOME",
    ),
)
VALUES: dict[str, tuple[str, ...]] = {
    "batch": ("1", "2", "3"),
    "batch_sizes": ("1", "2", "2,1", "1,,2"),
    "input_shape": ("3x8x8", "1x1x1", "3x8x9"),
    "rounds": ("1", "2"),
    "runs": ("0",),
    "repetitions": ("2", "3", "1"),
    "up_to": ("2", "4", "65537"),
    "workspace_limit": ("64MiB", "1MiB", "0B", "none", "headroom", "64MB", "1e3MiB"),
    "workspace_budget": ("1MiB", "0B", "none", "headroom"),
    "budget": ("1MiB", "0B", "none"),
    "cache_budget": ("1MiB", "none", "0B"),
    "algorithms": ("gemm", "native,gemm", "fft", "gem", "winograd-2x2", "GEMM"),
    "max_relative_error": ("1e-3", "1e300", "1e-15", "1e999"),
    "time_limit": ("1ms", "0.1ms", "0.5ms", "5 parsecs"),
    "threads": ("1", "2", "1025"),
    "device": ("cpu", "cuda", "mps", "cuda:0", "CPU", "meta"),
    "environment": ("1", "0", "99", "thread", "AVX"),
    "layer_name": ("only", "conv", "onyl"),
    "micro_batches": ("1,2", "2", "1,,2"),
    "filters": ("3x3", "all", "9x9"),
    "limits": ("8MiB", "8MiB,0B", "none"),
    "run_time_limit": ("0", "1ms"),
    "ranks": ("1,2,4,...,64", "3", "1000000", "2,1", "1,2,...,9", "...", "1,,2"),
    "bucket_caps": ("default,1", "25", "0.001", "-1"),
    "period": ("2", "3", "1001"),
    "latency": ("5us", "0", "none", "5 parsecs"),
    "bandwidth": ("25GB/s", "1kbit/s", "0GB/s", "25GB", "1e9"),
    "profiles": ("profile.csv", "profile.csv,profile.csv", "own.sqlite,profile.csv", "t.csv", "profile.csv,"),
    "loads": ("0", "1", "0,1", "-1"),
    "rest": ("1ms", "1ms,2ms", "none", "-1ms"),
    "precisions": ("float32", "bfloat16", "float32,float16"),
    "network": (*SOURCES, "alexnte"),
    "networks": (*SOURCES, "alexnte"),
}
# Short runs by default; what is drawn comes later, and counts.
DEFAULTS = {"time_limit": "1ms", "algorithms": "gemm", "rounds": "2", "runs": "0", "up_to": "3", "threads": "1"}
DEFAULTS |= {"precisions": "float32", "memory_formats": "contiguous", "run_time_limit": "1ms"}

SMALL = "{},1,2,4,4,2,3,3,1,1,1,1\n"  # a layer of one of DeepBench's sets

USERS = """
from torch import nn
def make():
    print("×")
    return nn.Conv2d(3, 2, 3)
def leave():
    import sys; sys.exit(7)
def stop():
    raise KeyboardInterrupt
def raise_():
    raise OSError("no such luck")
"""


def tiny(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, num_classes))


def one_rank(job: Callable[[], object], ranks: int, device: str) -> object:
    """What ranks run in processes of their own runs here, where networks are small."""
    with group_of_one(), freeing_what_failed():
        return job()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files of all kinds, and networks and benchmarks that take little time."""
    monkeypatch.chdir(tmp_path)
    for module in (networks, layers, models):
        monkeypatch.setattr(module, "NETWORKS", {"alexnet": networks.Network(tiny, input_shape=(3, 8, 8))})
    monkeypatch.setattr(data_parallel, "on_every_rank", one_rank)
    monkeypatch.setattr(layers, "_DATA", tmp_path)  # the real ones have layers of seconds
    monkeypatch.delitem(sys.modules, "users", raising=False)
    (tmp_path / "folder").mkdir()
    os.mkfifo("pipe.csv")
    Path("circle").symlink_to("circle")
    Path("link.csv").symlink_to("t.csv")
    for name, text in {
        "t.csv": HEADING + "only,2,4,4,2,3,3,1,1,1,1\n",
        "deepbench_conv.csv": "".join(
            ("set,n,c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w\n", *map(SMALL.format, TABLES.values()))
        ),
        "twice.csv": HEADING + "a,2,4,4,2,3,3,1,1,1,1\nb,2,4,4,4294967296,3,3,1,1,0,1\n",
        "empty.csv": "",
        "users.py": USERS,
        "junk.json": '{"a": NaN}',
        "broken.sqlite": "SQLite format 3\0",
        "out.json.new": "mine",
    }.items():
        Path(name).write_text(text)
    tune = (
        "tune",
        "t.csv",
        *("--batch", "2", "--algorithms", "gemm", "--time-limit", "1ms", "--database", "own.sqlite"),
    )
    assert invoke(*tune).exit_code == 0
    assert invoke("database", "export", "profile.csv", "--database", "own.sqlite").exit_code == 0
    yield tmp_path
    monkeypatch.delitem(sys.modules, "users", raising=False)


def values_of(param: click.Parameter) -> st.SearchStrategy[str]:
    """What makes sense, more often than not; else anything."""
    sane: Sequence[str] = VALUES.get(param.name or "", ())
    if isinstance(param.type, OutputFile):
        sane = OUTPUTS
    elif isinstance(param.type, OutputFolder):
        sane = ("results", "folder", "t.csv")
    elif isinstance(param.type, InputFile) and not sane:
        sane = SOURCES if param.name == "source" else FILES
    elif isinstance(param.type, click.Choice):
        sane = tuple(param.type.choices)
    elif not sane:
        sane = tuple(param.type.name.strip("[]").replace("|", ",").split(","))
    others = [*EDGES, *NO_SOURCES, *OTHERS, *FILES]
    if isinstance(param.type, OutputFile | OutputFolder):
        others.remove("pipe.csv")  # to write to a pipe is to wait for its reader
    odd = st.sampled_from(others) | st.text(max_size=8)
    if param.name in ("time_limit", "run_time_limit"):  # none, or an unbounded number of seconds, is no mistake
        odd = st.sampled_from(("", "-1s", "nan", "1e3", "s"))
    return st.integers(0, 9).flatmap(lambda luck: st.sampled_from(sane) if luck < 7 else odd)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    name, command = draw(st.sampled_from(COMMANDS))
    words, later = name.split()[1:], []
    for param in command.params:
        if isinstance(param, click.Argument):
            later += draw(st.lists(values_of(param), min_size=1, max_size=2 if param.nargs == -1 else 1))
        elif param.name in DEFAULTS:
            words += [param.opts[0], DEFAULTS[param.name]]
    options = [param for param in command.params if isinstance(param, click.Option)]
    given = draw(st.lists(st.sampled_from(options), max_size=4, unique=True)) if options else []
    given += [param for param in options if param.required and param not in given and draw(st.integers(0, 9))]
    for param in given:
        words += [param.opts[0], *([] if param.is_flag else [draw(values_of(param))])]
    if not draw(st.integers(0, 19)):
        later.append(draw(st.sampled_from(("--help", "--frobnicate", "more", "--json"))))
    return words + later


COMMANDS = [*commands()]


def run(arguments: list[str]) -> click.testing.Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and matplotlib, of names without a sign in the font and the like
        try:
            return CliRunner().invoke(main, arguments)
        except Program:  # would run now, in place of the command
            return CliRunner().invoke(main, ["run", "--help"])


@given(data=st.data())
@settings(
    max_examples=how_many(120, 2500),
    deadline=None,
    derandomize=not IS_FULL,
    database=None,
    print_blob=IS_FULL,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_command_line_ends_with_a_result_or_a_message(data: Any, folder: Path) -> None:
    arguments = data.draw(command_lines())
    before = {Path(name): Path(name).read_bytes() for name in (*NAMES.values(), "out.json.new")}
    result = run(arguments)
    torch.set_num_threads(1)
    event(f"status {result.exit_code}")
    told = "".join(traceback.format_exception(*result.exc_info)) if result.exc_info else ""
    assert isinstance(result.exception, SystemExit | None), (arguments, told)
    assert result.exit_code in (0, 2, 130), (arguments, result.output)
    assert "Traceback" not in result.output, arguments
    assert result.exit_code == 0 or result.stderr.strip(), (arguments, "no message")
    named = [NAMES.get(word) for word in arguments]
    for path, content in before.items():  # named once it may be an output, which is nothing else
        assert named.count(path.name) == 1 or path.read_bytes() == content, (arguments, f"{path} was lost")
        path.write_bytes(content)
    assert Path("own.sqlite").read_bytes().startswith(b"SQLite format 3\0"), arguments
    assert not list(Path().glob(".mucudnn-*")), (arguments, "something is left behind")
