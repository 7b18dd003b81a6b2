"""Invalid input, damaged databases, signals and huge sizes: a message that says what to do, and no loss of data."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_line import HEADING, TUNE, fail, invoke, one_layer, rows, start

from mucudnn.words.problem import Operation


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    return one_layer(tmp_path)


@pytest.fixture
def source_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "source.csv"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module with the function ``make``; gives ``module:make``."""

    def write(body: str) -> str:
        (tmp_path / "users_model.py").write_text(f"from torch import nn\ndef make():\n    {body}\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "users_model", raising=False)
        return "users_model:make"

    return write


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["layers", "alexnte"], "'alexnte'; did you mean alexnet? allowed are alexnet, vgg16"),
        (["layers", "nowhere.csv"], "nowhere.csv"),
        (["layers", "alexnet", "--batch", "0"], "0 is not in the range x>=1"),
        (["layers", "no_such_module:make", "--input", "3x8x8"], "no_such_module"),
        (["layers", "os:make", "--input", "224"], "write for example 3x224x224"),
        (["tune", "alexnet", "--policy", "some"], "policy is 'some'; allowed are undivided, power-of-two, all"),
        (
            ["tune", "alexnet", "--operations", "forward,sideways"],
            "one of operations is 'sideways'; allowed are forward, backw",
        ),
        (["tune", "alexnet", "--memory-format", "NCHW"], "allowed are contiguous, channels_last"),
        (["tune", "alexnet", "--dtype", "int8"], "'int8' is not one of 'float16', 'bfloat16', 'float32', 'float64'"),
        (["tune", "alexnet", "--workspace-limit", "64MB"], "write 64MiB (powers of 1024) or 64000000B (exactly)"),
        (["tune", "alexnet", "--time-limit", "soon"], "write for example 60s"),
        (["tune", "alexnet", "--max-relative-error", "0"], "max_relative_error is 0.0; it must be at least 2.22"),
        (["tune", "alexnet", "--workspace-limit", "٦٤MiB"], "is not understood; write a number and a unit"),
        (["tune", "alexnet", "--time-limit", "٣s"], "'٣s' is not understood; write for example 60s"),
        (["tune", "alexnet", "--algorithms", "gem"], "gem; this machine has native"),
        (["tune", "alexnet", "--device", "tpu"], "'tpu'"),
        (["tune", "alexnet", "--device", "cuda"], "is built without CUDA: install a CUDA build of torch"),
        (["tune", "alexnet", "--threads", "0"], "0 is not in the range x>=1"),
        (
            ["tune", "alexnet", "--json", "no/such/folder/out.json"],
            "the folder no/such/folder does not exist; create it",
        ),
        (["tune", "alexnet", "--json", "/"], "/ is a folder; name a file"),
        (["layers", "alexnet", "--batch", f"{10**30}"], f"{10**30}: it must be at most 2147483647"),
        (["tune", "alexnet", "--threads", "10000"], "10000: it must be at most 1024"),
        (["scale", "alexnet", "--up-to", "65537"], "65537: it must be at most 65536"),
        (["layers", "alexnet", "--input", "99999999x99999999x99999999"], "cannot compute an input of 1x99999999x"),
        (["layers", "alexnet", "--input", "9999999999x1x1"], "write for example 3x224x224"),
        (["bench", "training", "alexnet", "--batch", "9" * 5000], "write for example 1,8,32"),
        (["bench", "limits", "--filters", "9" * 5000 + "x3"], "write for example 3x3,5x5"),
        (
            ["tune", "alexnet", "--algorithms", ""],
            "algorithms is empty or has an empty name; name some",
        ),
        (["layers", ""], "'' is not a source; name a network"),
        (["tune", "alexnet", "--database", ""], "'' is empty; name a file"),
        (["layers", "."], "source is '.'"),
        (["layers", "/dev/zero"], "/dev/zero is not a regular file"),
        (["layers", "pipe.csv"], "pipe.csv is not a regular file"),
        (["tune", "alexnet", "--database", "/dev/null"], "/dev/null is not a regular file"),
        (["layers", "long.csv"], "long.csv cannot be read as a CSV file of layers: field larger than field limit"),
        (["layers", "binary.csv"], "binary.csv cannot be read as a CSV file of layers"),
        (["database", "export", "rows.txt"], "add --format csv or --format json-lines"),
        (["database", "merge", "no.sqlite"], "no.sqlite"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_bad_values(arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.csv")
    Path("long.csv").write_text("c" * 1_000_000)
    Path("binary.csv").write_bytes(b"\x00\xff\xfe")
    assert expected in fail(*arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEADING.replace(",k,", ",kk,"), "line 1: no column k"),
        (HEADING + "a,4,8,8,4,3,3,1,1,1,1\nb,4,8,eight,4,3,3,1,1,1,1\n", "line 3: w is 'eight'; write a whole number"),
        (HEADING + "a,4,8,8,4\n", "line 2: the number of values"),
        (HEADING + "a,4,8,8,4,11,11,1,1,1,1\n", "line 2: not a convolution: the filter covers 11x11 but the padded"),
        (HEADING, "has no convolution"),
    ],
)
def test_bad_csv_lines(text: str, expected: str, source_file: Callable[[str], Path]) -> None:
    path = source_file(text)
    message = fail("tune", path, *TUNE)
    assert expected in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise ValueError('out of ideas')", "cannot be built: out of ideas (ValueError in "),
        ("return nn.Linear(8, 8)", "has no convolution"),
        (
            "import torch\n    x = torch.zeros(1, 3, 8, 8)\n"
            "    return torch.export.export(nn.Conv2d(3, 4, 3), (x,)).module()",
            "cannot be built: Calling eval() is not supported",
        ),
        ("return 5", "gives int; it must give a torch.nn.Module"),
        ("return nn.Conv2d(4, 4, 3)", "cannot compute an input of 1x3x8x8"),
        ("return nn.Conv2d(3, 4, 11)", "cannot compute an input of 1x3x8x8"),
    ],
)
def test_bad_models(body: str, expected: str, factory: Callable[[str], str]) -> None:
    assert expected in fail("tune", factory(body), *TUNE, "--input", "3x8x8")


def test_a_setting_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUCUDNN_WORKSPACE_LIMT", "MUCUDNN_QUX"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("MUCUDNN_BATCH", "2")  # an option of other commands
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = invoke("layers", "alexnet")
    assert done.exit_code == 0
    assert "MUCUDNN_WORKSPACE_LIMT is ignored: there is no such setting; did you mean WORKSPACE_LIMIT?" in (done.stderr)
    assert "MUCUDNN_QUX is ignored: there is no such setting\n" in done.stderr
    assert "MUCUDNN_BATCH" not in done.stderr


def test_a_model_needs_its_input_shape(factory: Callable[[str], str]) -> None:
    assert "give --input, for example --input 3x224x224" in fail("tune", factory("return nn.Conv2d(3, 4, 1)"), *TUNE)


@pytest.mark.parametrize("command", [("tune",), ("bench", "network")])
def test_a_network_without_the_wanted_operation(command: tuple[str, ...], factory: Callable[[str], str]) -> None:
    """The gradient of its input, which nobody asks for."""
    source = (factory("return nn.Conv2d(3, 4, 3)"), "--input", "3x8x8", "--algorithms", "gemm")
    message = fail(*command, *source, "--operations", "backward-data")
    assert "users_model:make has no backward_data to tune; choose other operations" in message


def test_too_small_a_limit_names_the_smallest_of_each_problem(layers: Path) -> None:
    message = fail("tune", layers, "--batch", "2", "--algorithms", "gemm", "--workspace-limit", "1B")
    for operation in Operation:
        assert f"only, {operation} 4x8x8 -> 4" in message
    assert message.count("at least") == 3


def test_a_file_that_is_no_database_is_named_and_kept(layers: Path, database: Path) -> None:
    database.write_text("my diary, not a database " * 100)
    message = fail("tune", layers, *TUNE)
    assert f"{database} is not an SQLite database" in message
    assert database.read_text().startswith("my diary")


def test_a_read_only_database_is_read_and_named(layers: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("tune", layers, *TUNE, "--operations", "forward")
    before = rows(database)
    monkeypatch.setattr("mucudnn.database.sqlite_file._can_be_written", lambda path: False)  # tests may run as root
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = invoke("tune", layers, *TUNE)
    assert result.exit_code == 0, result.output
    assert "Warning: tuning goes on, but its measurements are not stored" in result.stderr
    assert str(database) in result.stderr
    assert rows(database) == before


def wait_for_a_measurement(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.stat().st_size:
            try:
                if rows(path):
                    return
            except sqlite3.OperationalError:  # the tables are not there yet
                pass
        time.sleep(0.02)
    pytest.fail(f"no measurement: {process.communicate()}")


@pytest.fixture
def many_layers(source_file: Callable[[str], Path]) -> Path:
    """Enough that a run is still in the middle when the first measurement is there."""
    return source_file(HEADING + "".join(f"layer{k},16,32,32,{k},3,3,1,1,1,1\n" for k in range(8, 40)))


def test_ctrl_c_prints_what_is_ready_and_gives_130(many_layers: Path, database: Path) -> None:
    process = start("tune", many_layers, *TUNE, "--operations", "forward")
    wait_for_a_measurement(database, process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "total" in output
    assert "of 32 are ready. All measurements are kept" in errors
    assert "Traceback" not in errors
    assert rows(database)


def test_ctrl_c_outside_of_tuning_gives_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mucudnn.bench.sources.layers.load_source", interrupt)
    result = invoke("layers", "alexnet")
    assert result.exit_code == 130
    assert result.stderr.startswith("Interrupted. All measurements are kept; run the same command again")


# Sizes beyond all bounds on the command line: a message and status 2, and no process that dies or fills the memory.


COMMANDS = {
    "layers": ("layers", "FILE", "--batch"),
    "tune": ("tune", "FILE", "--batch"),
    "explain": ("explain", "FILE", "--budget", "64MiB", "--batch"),
    "scale": ("scale", "alexnet", "--batch"),
    "scale up to": ("scale", "alexnet", "--up-to"),
    "bench network": ("bench", "network", "FILE", "--batch"),
    "bench limits": ("bench", "limits", "FILE", "--batch"),
    "bench memory": ("bench", "memory", "alexnet", "--batch"),
    "bench training": ("bench", "training", "alexnet", "--batch"),
    "bench inference": ("bench", "inference", "alexnet", "--batch"),
}


@pytest.fixture
def smallest(tmp_path: Path) -> Path:
    """One number in, one number out: the batch size alone is what is too large."""
    path = tmp_path / "smallest.csv"
    path.write_text("c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w\n1,1,1,1,1,1,0,0,1,1\n")
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_batches_beyond_all_bounds(name: str, smallest: Path) -> None:
    arguments = [str(smallest) if argument == "FILE" else argument for argument in COMMANDS[name]]
    for batch in (1_048_577, 10**30):
        message = fail(*arguments, batch)
        assert str(batch) in message
        assert "at most" in message
