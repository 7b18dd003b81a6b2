"""``mucudnn database`` at its edges: what it reads back, what it never makes, and what it says of bad rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from support.command_line import fail, invoke
from support.database_rows import FULL, HERE, PROBLEM, change, fill, rows_of


@pytest.fixture
def full(database: Path) -> Path:
    """The default database, with three rows."""
    return fill(database)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An export of another database with the same rows."""
    path = tmp_path / "rows.jsonl"
    assert invoke("database", "export", path, "--database", fill(tmp_path / "other.sqlite")).exit_code == 0
    return path


def succeed(*arguments: object) -> Result:
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_an_export_is_merged(exported: Path, database: Path) -> None:
    before = exported.read_bytes()
    assert succeed("database", "merge", exported).output == f"{exported}: 3 rows added, 0 were there\n"
    assert succeed("database", "merge", exported).output == f"{exported}: 0 rows added, 3 were there\n"
    assert rows_of(database, HERE, PROBLEM) == FULL
    assert exported.read_bytes() == before


def test_an_export_with_a_bad_row_is_refused_as_a_whole(tmp_path: Path, full: Path) -> None:
    path = tmp_path / "rows.jsonl"
    succeed("database", "export", path, "--database", fill(tmp_path / "other.sqlite"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["threads"] = -2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    change(full, "DELETE FROM measurements WHERE reason IS NOT NULL")
    before = rows_of(full, HERE, PROBLEM)
    message = fail("database", "merge", tmp_path / "other.sqlite", path)
    assert f"profile {path}, line 2: threads must be a whole number, at least 1; fix that" in message
    assert rows_of(full, HERE, PROBLEM) == before, "nothing of the other one was added, either"


@pytest.mark.parametrize("other", ["missing.sqlite", "diary.txt"])
def test_what_cannot_be_merged_makes_no_database(tmp_path: Path, database: Path, other: str) -> None:
    (tmp_path / "diary.txt").write_text("my diary")
    assert other in fail("database", "merge", tmp_path / other)
    assert not database.exists()


@pytest.mark.parametrize("command", [("info",), ("export", "rows.jsonl")])
@pytest.mark.parametrize("name", ["mistyped.sqlite", "folder/mistyped.sqlite"])
def test_a_mistyped_name_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    message = fail("database", *command, "--database", name)
    assert f"database {name} does not exist; name another file with --database or MUCUDNN_DATABASE" in message
    assert [*tmp_path.iterdir()] == []
