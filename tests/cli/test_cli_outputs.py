"""Outputs of commands: what they must not replace, and what cannot be written, is known before anything is measured."""

from __future__ import annotations

import importlib
import io
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from support.command_line import TUNE, commands, fail, invoke, one_layer, rows

import mucudnn.bench
from mucudnn.bench.sources import table_tuning
from mucudnn.cli.main import main
from mucudnn.database.database import Database
from mucudnn.terminal.command_files import FileCommand, FileType, InputFile, InputFolder, OutputFile, OutputFolder
from mucudnn.terminal.console import progress_bar
from mucudnn.terminal.streams import _IN_ASCII
from mucudnn.words.errors import OutputError

NO_FILES = {"layer_name", "module_name", "network", "networks", "only"}  # parameters of plain text, which name no file
FOLDERS = {"out", "archive"}  # of bench.gpu_suite, which makes them where they are missing


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


def module_commands() -> Iterator[tuple[str, click.Command]]:
    for module in pkgutil.walk_packages(mucudnn.bench.__path__, "mucudnn.bench."):
        if module.name.rpartition(".")[2].startswith("_"):
            continue  # a compiled library
        found = importlib.import_module(module.name)
        if "ModuleCommand" in vars(found):
            yield module.name, found.main


@pytest.mark.parametrize(("name", "command"), [*commands(), *module_commands()])
def test_every_parameter_says_whether_it_is_a_file(name: str, command: click.Command) -> None:
    """A new command whose output could replace its input does not pass."""
    assert isinstance(command, FileCommand), f"{name} checks no files"
    for param in command.params:
        undeclared = isinstance(param.type, (click.Path, click.File)) or param.type is click.STRING
        assert not undeclared or param.name in NO_FILES | FOLDERS, f"{name}: {param.name} does not say what it is"
        if isinstance(param.type, FileType):
            kinds = (InputFile, InputFolder, OutputFile, OutputFolder)
            assert isinstance(param.type, kinds), f"{name}: {param.name} is neither in nor out"


def test_no_other_output_is_in_the_folder_of_the_results(layers: Path, tmp_path: Path, unmeasured: None) -> None:
    out = tmp_path / "results"
    out.mkdir()
    result = invoke("bench", "network", layers, "--out", out, "--json", out / "rows.jsonl")
    assert result.exit_code == 2
    assert "rows.jsonl is in the folder of the results" in result.stderr


def test_the_folder_of_the_results_is_no_file(layers: Path, unmeasured: None) -> None:
    result = invoke("bench", "network", layers, "--out", layers)
    assert result.exit_code == 2
    assert "is a file; name a folder" in result.stderr


def same(folder: Path, path: Path) -> Path:
    return path


def another_spelling(folder: Path, path: Path) -> Path:
    return path.parent / "." / ".." / path.parent.name / path.name


def link(folder: Path, path: Path) -> Path:
    (folder / "link.csv").symlink_to(path)
    return folder / "link.csv"


def hard_link(folder: Path, path: Path) -> Path:
    (folder / "link.csv").hardlink_to(path)
    return folder / "link.csv"


@pytest.mark.parametrize("named", [same, another_spelling, link, hard_link])
def test_an_output_that_is_an_input_is_refused(
    named: Callable[[Path, Path], Path], layers: Path, tmp_path: Path, unmeasured: None
) -> None:
    before = layers.read_bytes()
    message = fail("tune", layers, *TUNE, "--json", named(tmp_path, layers))
    assert "is what 'SOURCE' reads, which would be lost; name another file" in message
    assert layers.read_bytes() == before


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("how", ["option", "variable", "link"])
def test_an_output_that_is_the_database_is_refused_before_there_is_one(
    how: str, suffix: str, layers: Path, database: Path, tmp_path: Path, unmeasured: None
) -> None:
    options: tuple[object, ...] = ()
    if how == "option":
        database = tmp_path / "other.sqlite"
        options = ("--database", database)
    elif how == "link":
        (tmp_path / "folder").symlink_to(tmp_path, target_is_directory=True)
        database = tmp_path / "folder" / database.name
    message = fail("tune", layers, *TUNE, *options, "--json", f"{database}{suffix}")
    assert "is the database or part of it, which would be lost; name another file" in message


def test_a_link_to_a_database_protects_both(layers: Path, tmp_path: Path, unmeasured: None) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "here.sqlite").symlink_to(tmp_path / "far" / "there.sqlite")
    for output in ("here.sqlite", "here.sqlite-wal", "far/there.sqlite", "far/there.sqlite-wal"):
        options = ("--database", tmp_path / "here.sqlite", "--json", tmp_path / output)
        assert "is the database or part of it" in fail("tune", layers, *TUNE, *options)


def test_no_command_writes_over_a_database(tuned: Path, layers: Path, tmp_path: Path, unmeasured: None) -> None:
    """Not its own, nor one that it does not use."""
    before, other = rows(tuned), tmp_path / "other.csv"
    shutil.copy(tuned, other)
    for output, expected in ((tuned, "database"), (other, "is an SQLite database")):
        export = ("database", "export", output, "--format", "csv")
        solve = ("solve", tuned, "--network", layers, "--batch", "2", "--json", output)
        for arguments in (export, (*export, "--database", tuned), solve, ("tune", layers, *TUNE, "--json", output)):
            assert expected in fail(*arguments)
    explained = ("explain", layers, "--budget", "1MiB", "--from", other, "--csv", other)
    assert "database" in fail(*explained)
    assert rows(tuned) == rows(other) == before


def test_a_profile_and_the_users_model_are_inputs(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> None:
    profile, package = tmp_path / "profile.csv", tmp_path / "package"
    assert invoke("database", "export", profile).exit_code == 0
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    assert "'DATABASE|PROFILE' reads" in fail("solve", profile, "--network", "alexnet", "--json", profile)
    for file in ("model.py", "__init__.py"):
        arguments = ("tune", "package.model:make", "--input", "3x8x8", "--json", package / file)
        assert "is what 'SOURCE' reads" in fail(*arguments)
    (tmp_path / "h.json").write_text("{}")
    device = ("--device-properties", "h.json", "--json", "./h.json")
    assert "'--device-properties' reads" in fail("engines", "alexnet", "--layer", "features.0", *device)


def test_two_outputs_cannot_be_one_file(layers: Path, tmp_path: Path, unmeasured: None) -> None:
    out = tmp_path / "m-curve.csv"
    explain = ("explain", layers, "--budget", "1MiB")
    assert "is what '--csv' writes" in fail(*explain, "--csv", out, "--json", another_spelling(tmp_path, out))
    assert "is what '--csv' writes" in fail(*explain, "--csv", tmp_path / "m.csv", "--json", out), "the curve's file"
    out.symlink_to(layers)
    assert "is what 'SOURCE' reads" in fail(*explain, "--csv", tmp_path / "m.csv")


def test_streams_can_be_outputs_of_everything(tuned: Path, layers: Path) -> None:
    explain = ("explain", layers, "--from", tuned, "--budget", "1MiB", "--batch", "2", "--operations", "forward")
    result = invoke(*explain, "--csv", "/dev/null", "--json", "/dev/null")
    assert result.exit_code == 0, result.output


def test_a_users_file_beside_the_output_is_left_alone(tuned: Path, layers: Path, tmp_path: Path) -> None:
    (tmp_path / "z.json.new").write_text("mine")
    solve = ("solve", tuned, "--network", layers, "--batch", "2", "--operations", "forward")
    assert invoke(*solve, "--json", tmp_path / "z.json").exit_code == 0
    assert (tmp_path / "z.json.new").read_text() == "mine"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("/dev/full", "No space left on device"),
        ("x" * 300, "File name too long"),
        ("circle", "Too many levels of symbolic links"),
        ("layers.csv/out", "Not a directory"),
        ("", "'' is empty; name a file"),
        ("/proc/out", "/proc"),
    ],
)
def test_an_output_that_cannot_be_written_is_known_before(
    output: str, expected: str, layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    assert expected in fail("tune", layers, *TUNE, "--json", output)


def test_an_output_that_fails_in_the_end_costs_neither_table_nor_rows(
    layers: Path, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is removed while the command measures; the other file is written all the same."""
    folder, tune_table = tmp_path / "folder", table_tuning.tune_table
    folder.mkdir()

    def removing(*arguments: object, **rest: object) -> object:
        folder.rmdir()
        return tune_table(*arguments, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(table_tuning, "tune_table", removing)
    explain = ("explain", layers, *TUNE, "--operations", "forward", "--budget", "1MiB")
    result = invoke(*explain, "--csv", folder / "out.csv", "--json", tmp_path / "out.json")
    assert result.exit_code == 2
    assert "the folder" in result.stderr
    assert "Traceback" not in result.output
    assert "only" in result.stdout
    assert rows(database)
    assert json.loads((tmp_path / "out.json").read_text())["problems"]


def test_records_have_no_infinite_numbers(tuned: Path, layers: Path, tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    solve = ("solve", tuned, "--network", layers, "--batch", "2", "--operations", "forward")
    assert "is not a finite number" in fail(*solve, "--max-relative-error", "inf")
    assert "is not a finite number" in fail(*solve, "--max-relative-error", "nan")
    assert invoke(*solve, "--json", tmp_path / "out.json").exit_code == 0
    json.loads((tmp_path / "out.json").read_text(), parse_constant=refuse)


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
        ("mucudnn --help > /dev/full", 2, "standard output cannot be written: No space left on device"),
        ("mucudnn --version >&-", 2, "standard output cannot be written: it is closed"),
        ("mucudnn --help | head -1", 0, ""),
        ("mucudnn layers alexnet 2>&- > /dev/null", 0, ""),
        ("mucudnn layer 2>&-", 2, ""),
        ("mucudnn layer 2>/dev/full", 2, ""),
        ("mkdir $TMP/gone; cd $TMP/gone; rmdir $TMP/gone; mucudnn --version", 2, "the current folder does not exist"),
    ],
)
def test_standard_streams_that_fail(line: str, status: int, expected: str, tmp_path: Path) -> None:
    result = shell(line, TMP=str(tmp_path), PYTHONPATH=str(Path(mucudnn.__file__).parents[1]))
    assert result.returncode == status, result.stderr
    assert expected in result.stderr
    assert expected or not result.stderr, "something is said of what is nobody's fault"
    assert "Traceback" not in result.stderr


def test_files_are_written_though_nobody_reads_the_table(tuned: Path, layers: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    solve = f"mucudnn solve {tuned} --network {layers} --batch 2 --operations forward"
    assert shell(f"{solve} --json {out} | true").returncode == 0
    assert json.loads(out.read_text())["complete"]
    assert shell(f"{solve} --json /dev/stdout | head -1").returncode == 0


class Full:
    """A standard output that has no room from the first byte on, which cannot be known before."""

    encoding, line_buffering, write_through = "utf-8", False, False

    def __init__(self) -> None:
        self.buffer = self

    def write(self, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise io.UnsupportedOperation


def test_standard_output_that_fails_later_costs_no_file(
    tuned: Path, layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = ["solve", str(tuned), "--network", str(layers), "--batch", "2", "--operations", "forward"]
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--json", str(out)])
    assert end.value.code == 2
    assert "standard output could not be written: No space left on device; all files and" in capsys.readouterr().err
    assert json.loads(out.read_text())["complete"]


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


def test_progress_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar() as move:
        move("on", 0.5)


def test_every_sign_that_is_printed_has_one_in_ascii() -> None:
    """One each, so that columns stay in line."""
    printed = {
        character
        for folder, _, names in os.walk(Path(mucudnn.__file__).parent, followlinks=True)
        for file in (Path(folder, name) for name in names if name.endswith(".py"))
        for character in file.read_text(encoding="utf-8")
        if not character.isascii()
    }
    assert printed <= _IN_ASCII.keys()
    assert all(len(sign) == 1 and sign.isascii() for sign in _IN_ASCII.values())


def test_an_output_error_is_one_of_ours() -> None:
    assert issubclass(OutputError, mucudnn.MucudnnError)


@pytest.mark.parametrize("sidecar", ["-wal", "-shm", "-journal"])
def test_what_sqlite_keeps_beside_any_database_is_no_output(layers: Path, tmp_path: Path, sidecar: str) -> None:
    """Not of the command's own alone: a killed writer's rows are in its log until somebody opens it again."""
    other = tmp_path / "other.sqlite"
    Database(other).close()
    for target in (f"{other}{sidecar}", f"{tmp_path}/link.json"):
        Path(tmp_path, "link.json").unlink(missing_ok=True)
        Path(tmp_path, "link.json").symlink_to(f"{other}{sidecar}")
        assert f"belongs to the database {other}" in fail("tune", layers, *TUNE, "--json", target)
        assert not Path(f"{other}{sidecar}").exists()


def test_a_name_that_ends_like_a_sidecar_is_an_output_where_there_is_no_database(
    tmp_path: Path, database: Path
) -> None:
    Database(database).close()
    (tmp_path / "notes").write_text("no database")
    assert invoke("database", "export", tmp_path / "notes-wal", "--format", "csv").exit_code == 0


@pytest.mark.parametrize(("name", "expected"), [("-", "'-' is no file"), ("new/", "ends in /, as a folder does")])
def test_names_that_mean_something_else_make_no_file(
    layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert expected in fail("tune", layers, *TUNE, "--json", name)
    assert set(tmp_path.iterdir()) == before


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
