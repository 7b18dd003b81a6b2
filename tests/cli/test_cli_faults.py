"""Unknown settings, damaged databases and signals: a message that says what to do, and no loss of data."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from support.command_line import HEADING, TUNE, fail, invoke, one_layer, rows

from mucudnn.core.problem import Operation


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mucudnn", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    return one_layer(tmp_path)


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
    monkeypatch.setattr("mucudnn.store.sqlite_file._can_be_written", lambda path: False)  # tests may run as root
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
def many_layers(tmp_path: Path) -> Path:
    """Enough that a run is still in the middle when the first measurement is there."""
    path = tmp_path / "source.csv"
    path.write_text(HEADING + "".join(f"layer{k},16,32,32,{k},3,3,1,1,1,1\n" for k in range(8, 40)))
    return path


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
