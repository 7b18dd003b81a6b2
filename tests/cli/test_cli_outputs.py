"""Outputs of commands: what they must not replace, and what cannot be written, is known before anything is measured."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.command_line import TUNE, commands, fail, invoke, one_layer, rows

import mucudnn.bench
from mucudnn.bench.sources import table_tuning
from mucudnn.cli.shared.commands import IN_ASCII, FileCommand
from mucudnn.store.database import Database

NO_FILES = {"layer_name", "module_name", "network", "networks", "only"}  # parameters of plain text, which name no file


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    return one_layer(tmp_path)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring fails the test."""

    def measure(*arguments: object, **rest: object) -> None:
        pytest.fail("something was measured")

    monkeypatch.setattr(table_tuning, "tune_table", measure)


@pytest.fixture
def tuned(layers: Path, database: Path) -> Path:
    assert invoke("tune", layers, *TUNE, "--operations", "forward").exit_code == 0
    return database


@pytest.mark.parametrize(("name", "command"), [*commands()])
def test_every_command_checks_its_files(name: str, command: click.Command) -> None:
    assert isinstance(command, FileCommand)
    assert all(param.type is not click.STRING or param.name in NO_FILES for param in command.params), name


def test_a_file_is_no_folder_of_results(layers: Path, unmeasured: None) -> None:
    assert "is a file" in fail("bench", "convolutions", layers, "--out", layers)


def another_spelling(path: Path) -> Path:
    return path.parent / "." / ".." / path.parent.name / path.name


def test_an_output_that_is_an_input_is_refused(layers: Path, tmp_path: Path, unmeasured: None) -> None:
    before, link = layers.read_bytes(), tmp_path / "link.csv"
    link.symlink_to(layers)
    for named in (layers, another_spelling(layers), link):
        message = fail("tune", layers, *TUNE, "--json", named)
        assert "is also 'SOURCE' and would be lost; name another file" in message
        assert layers.read_bytes() == before


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_an_output_that_is_the_database_is_refused_before_there_is_one(
    suffix: str, layers: Path, tmp_path: Path, unmeasured: None
) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "here.sqlite").symlink_to(tmp_path / "far" / "there.sqlite")
    options = ("--database", tmp_path / "here.sqlite", "--json", tmp_path / "far" / f"there.sqlite{suffix}")
    assert "is also '--database' and would be lost" in fail("tune", layers, *TUNE, *options)


def test_no_command_writes_over_a_database(tuned: Path, layers: Path, tmp_path: Path, unmeasured: None) -> None:
    """Not its own, nor one that it does not use."""
    before, other = rows(tuned), tmp_path / "other.jsonl"
    shutil.copy(tuned, other)
    for output, expected in ((tuned, "database"), (other, "is an SQLite database")):
        export = ("database", "export", output)
        solve = ("tune", layers, "--stored", "--database", tuned, "--batch", "2", "--json", output)
        for arguments in (export, (*export, "--database", tuned), solve, ("tune", layers, *TUNE, "--json", output)):
            assert expected in fail(*arguments)
    assert rows(tuned) == rows(other) == before


def test_the_users_model_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("raise SystemExit('imported')\n")
    for source in ("model:make", "model.py:make"):
        assert "is a Python file" in fail("tune", source, "--input", "3x8x8", "--json", "model.py")


def test_an_output_that_fails_in_the_end_costs_neither_table_nor_rows(
    layers: Path, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is removed while the command measures."""
    folder, tune_table = tmp_path / "folder", table_tuning.tune_table
    folder.mkdir()

    def removing(*arguments: object, **rest: object) -> object:
        folder.rmdir()
        return tune_table(*arguments, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(table_tuning, "tune_table", removing)
    result = invoke("tune", layers, *TUNE, "--operations", "forward", "--json", folder / "out.json")
    assert result.exit_code == 2
    assert "the folder" in result.stderr
    assert "Traceback" not in result.output
    assert "only" in result.stdout
    assert rows(database)


# Standard output and error, in a process of its own: a shell leads them elsewhere.


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f'set -o pipefail; mucudnn() {{ {sys.executable} -m mucudnn "$@"; }}; {line}'],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("line", "status", "expected"),
    [
        ("mucudnn --help > /dev/full", 2, "standard output could not be written: No space left on device"),
        ("mucudnn --version >&-", 0, ""),
        ("mucudnn --help | head -1", 0, ""),
        ("mucudnn layers alexnet 2>&- > /dev/null", 0, ""),
        ("mucudnn layer 2>&-", 2, ""),
        ("mucudnn layer 2>/dev/full", 2, ""),
    ],
)
def test_standard_streams_that_fail(line: str, status: int, expected: str) -> None:
    result = shell(line)
    assert result.returncode == status, result.stderr
    assert expected in result.stderr
    assert expected or not result.stderr, "something is said of what is nobody's fault"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii", "TERM": "dumb", "COLUMNS": "20"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_terminals_without_our_signs(environment: dict[str, str]) -> None:
    result = shell("mucudnn layers alexnet", **environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "11x11" in result.stdout
    assert result.stdout.isascii()
    assert "?" not in result.stdout


def test_every_sign_that_is_printed_has_one_in_ascii() -> None:
    """One each, so that columns stay in line."""
    printed = {
        character
        for folder, _, names in os.walk(Path(mucudnn.__file__).parent, followlinks=True)
        for file in (Path(folder, name) for name in names if name.endswith(".py"))
        for character in file.read_text(encoding="utf-8")
        if not character.isascii()
    }
    assert printed <= IN_ASCII.keys()
    assert all(len(sign) == 1 and sign.isascii() for sign in IN_ASCII.values())


def test_a_database_in_the_home_folder_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    Database(home / "kept.sqlite").close()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert invoke("database", "info", "--database", "~/kept.sqlite").exit_code == 0
    monkeypatch.setenv("MUCUDNN_DATABASE", "~/kept.sqlite")
    assert invoke("database", "info").exit_code == 0
    assert list(here.iterdir()) == []
