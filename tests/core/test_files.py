"""Files of results are whole at any moment, nobody else's, and never in the place of a database."""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from mucudnn.core.errors import OutputError
from mucudnn.core.files import require_writable, whole_file, whole_text, write_csv, write_each, write_json

FILES = ("result.json", "result.json.new")


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_file_is_what_it_was_until_the_new_one_is_whole(tmp_path: Path, fault: BaseException) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})

    def write_half() -> None:
        with whole_file(path) as stream:
            stream.write(b"half")
            stream.flush()
            assert json.loads(path.read_text()) == {"a": 1}
            raise fault

    with pytest.raises((KeyboardInterrupt, OutputError)):
        write_half()
    assert json.loads(path.read_text()) == {"a": 1}
    assert only(tmp_path) == ["result.json"], "something is left behind"


def test_nobody_elses_file_is_touched(tmp_path: Path) -> None:
    (tmp_path / "result.json.new").write_text("mine")
    write_json(tmp_path / "result.json", {})
    assert (tmp_path / "result.json.new").read_text() == "mine"
    assert only(tmp_path) == sorted(FILES)


def test_a_link_stays_a_link_to_a_file_that_is_whole(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, before = tmp_path / "far" / "target", tmp_path / "link", tmp_path / "before"
    target.write_text("before")
    before.hardlink_to(target)
    link.symlink_to(Path("far") / "target")
    with whole_text(link) as stream:
        stream.write("after")
    assert link.is_symlink()
    assert (target.read_text(), before.read_text()) == ("after", "before"), "written in place"
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "far" / "new")
    write_json(dangling, {})
    assert dangling.is_symlink()
    assert only(tmp_path / "far") == ["new", "target"]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o666])
def test_mode_is_that_of_the_file_replaced_or_the_umasks(tmp_path: Path, mode: int) -> None:
    old = tmp_path / "old"
    old.touch()
    old.chmod(mode)
    write_json(old, {})
    assert stat.S_IMODE(old.stat().st_mode) == mode
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "new", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_database_is_never_replaced_whatever_its_name(tmp_path: Path) -> None:
    path, link = tmp_path / "notes.json", tmp_path / "link"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a)")
    link.symlink_to(path)
    before = path.read_bytes()
    for name in (path, link):
        with pytest.raises(OutputError, match="is an SQLite database, which would be lost; name another file"):
            write_json(name, {})
    assert path.read_bytes() == before


def circle(folder: Path) -> Path:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return folder / "a"


def link_into_nothing(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "missing" / "out")
    return folder / "link"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda folder: folder, "is a folder; name a file"),
        (lambda folder: folder / "missing" / "out", "the folder .*missing does not exist; create it"),
        (link_into_nothing, "the folder .*missing does not exist; create it"),
        (circle, "Too many levels of symbolic links"),
        (lambda folder: folder / ("x" * 300), "File name too long"),
        (lambda folder: Path("/proc/out.json"), "cannot be written|does not exist"),
        (lambda folder: Path("/sys/kernel/out"), "cannot be written|does not exist"),
    ],
)
def test_what_cannot_be_written_is_known_before(made: Callable[[Path], Path], expected: str, tmp_path: Path) -> None:
    path = made(tmp_path)
    before = only(tmp_path)
    for attempt in (require_writable, partial(write_json, record={})):
        with pytest.raises(OutputError, match=expected):
            attempt(path)
    assert only(tmp_path) == before


def test_devices_and_pipes_are_written_to_as_they_are(tmp_path: Path) -> None:
    write_json(Path("/dev/null"), {})
    assert not Path("/dev/null").is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        require_writable(pipe)
        write_json(pipe, {"a": 1})
        assert json.loads(os.read(reader, 1000)) == {"a": 1}
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["/dev/stdout", "-"])
def test_standard_output_goes_on_where_it_is(tmp_path: Path, name: str) -> None:
    """Also in a file: neither what was printed before nor after is lost."""
    code = (
        "import sys; from pathlib import Path; from mucudnn.core.files import write_json\n"
        "print('before'); write_json(Path(sys.argv[1]), {}); print('after')"
    )
    with (tmp_path / "out").open("w") as stream:
        subprocess.run([sys.executable, "-c", code, name], stdout=stream, cwd=tmp_path, check=True)
    assert (tmp_path / "out").read_text() == "before\n{}\nafter\n"
    assert only(tmp_path) == ["out"]


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    record = {"a": float("inf"), "b": [float("nan"), 1.5], "c": ({"d": -float("inf")},), "e": "Infinity"}
    write_json(tmp_path / "out", record)
    assert json.loads((tmp_path / "out").read_text()) == {
        "a": None,
        "b": [None, 1.5],
        "c": [{"d": None}],
        "e": "Infinity",
    }


def test_csv_is_read_back_as_it_was(tmp_path: Path) -> None:
    rows = [{"a": "x\ny,\r", "b": 1}, {"a": "μ×", "b": None}]
    write_csv(tmp_path / "out", rows)
    with (tmp_path / "out").open(newline="", encoding="utf-8") as stream:
        assert list(csv.DictReader(stream)) == [{"a": "x\ny,\r", "b": "1"}, {"a": "μ×", "b": ""}]
    write_csv(tmp_path / "out", [])
    assert (tmp_path / "out").read_bytes() == b""


def test_a_file_that_fails_keeps_no_other_from_being_written(tmp_path: Path) -> None:
    write = partial(write_json, record={})
    with pytest.raises(OutputError, match=r"(?s)missing.*is a folder"):
        write_each((tmp_path / "missing" / "a", write), (None, write), (tmp_path, write), (tmp_path / "b", write))
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
