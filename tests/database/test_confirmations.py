"""Confirmations in the database: the newest counts, bad ones are passed over, and every way out has them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.database_rows import FULL, HERE, PROBLEM, fill, rows_of

from mucudnn.database.database import Database
from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.database.exports import export_csv, export_json_lines, open_stored
from mucudnn.database.rows import EnvironmentRows, MergeCounts
from mucudnn.words.errors import InvalidInputError

MODEL, OTHER_MODEL = "0a" * 32, "f" * 64
THERE = replace(HERE, threads=1)
IN_TURNS = {"torch_s": 0.2, "time_s": 0.1, "speedup": 2.0, "uncertainty": 0.01, "rounds": 5}
IN_PLACE = {"operations": ["backward_data", "backward_filter"], "call": IN_TURNS, "loses": False}
FOUND = {
    "versions": {"gemm": 1, "native": 2},
    "step": IN_TURNS,
    "recorded": IN_TURNS,
    "convolutions": IN_TURNS,
    "over_tuned": 1.5,
    "in_place": [None, IN_PLACE],
}
NEWER = {**FOUND, "over_tuned": None, "in_place": []}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with a confirmation beside one row of each other kind."""
    path = fill(tmp_path / "full.sqlite")
    with Database(path) as database:
        add(database)
    return path


def add(database: Database, findings: Mapping[str, Any] = FOUND, load: float | None = 0.0, **key: Any) -> None:
    given = {"environment": HERE, "fingerprint": MODEL, **key}
    database.add_confirmation(**given, findings=findings, load=load)


def found(path: Path, fingerprint: str = MODEL) -> object:
    with open_stored(path) as database:
        known = database.confirmation(HERE, fingerprint)
        return None if known is None else known[1]


def test_the_newest_of_a_model_in_an_environment_counts_and_the_others_stay_until_prune(path: Path) -> None:
    assert (found(path), found(path, OTHER_MODEL)) == (FOUND, None)
    with Database(path) as database:
        assert database.confirmation(THERE, MODEL) is None
        assert database.info() == (EnvironmentRows(HERE, 1, 1, 1, 1, 0),)
        add(database, NEWER)
        add(database, fingerprint=OTHER_MODEL)
    assert found(path) == NEWER
    with Database(path) as database:
        add(database, FOUND, load=0.9)
        assert database.info()[0].confirmations == 4
        assert database.prune() == 2
    assert found(path) == NEWER, "what was disturbed replaces nothing"
    assert found(path, OTHER_MODEL) == FOUND
    assert rows_of(path, HERE, PROBLEM) == FULL


def test_prune_removes_those_of_other_environments_and_versions(path: Path) -> None:
    with Database(path) as database:
        add(database, environment=THERE)
        assert database.prune(environments=[HERE]) == 1
        assert database.environments() == (HERE,)
        here = {"gemm": 1, "fft": 1, "native": 2}
        assert database.prune(versions=here) == 0
        assert database.prune(versions=here | {"native": 3}) == 1
        assert database.confirmation(HERE, MODEL) is None


@pytest.mark.parametrize("form", ["sqlite", "csv", "jsonl"])
def test_it_is_merged_as_it_was_from_files_and_exports(path: Path, tmp_path: Path, form: str) -> None:
    source = path
    if form != "sqlite":
        stream = io.StringIO(newline="")
        with Database(path) as database:
            (export_csv if form == "csv" else export_json_lines)(database, stream)
        source = tmp_path / f"rows.{form}"
        source.write_text(stream.getvalue(), newline="")
    with Database(tmp_path / "union.sqlite") as union, open_stored(source) as read, Database(path) as before:
        assert union.merge(read) == MergeCounts(added=4, known=0)
        assert union.merge(read) == MergeCounts(added=0, known=4)
        assert union.confirmation(HERE, MODEL) == before.confirmation(HERE, MODEL)
    assert rows_of(tmp_path / "union.sqlite", HERE, PROBLEM) == FULL


def test_what_cannot_be_stored_is_said_and_what_there_is_can_be_read(path: Path) -> None:
    wrong = {**FOUND, "step": {**IN_TURNS, "uncertainty": float("inf")}}
    with Database(path) as database:
        with pytest.raises(InvalidInputError, match="this confirmation of a model cannot be stored: findings must be"):
            add(database, wrong)
        with pytest.raises(InvalidInputError, match="fingerprint"):
            add(database, fingerprint="")
    with Database(path, read_only=True) as database:
        store = EnvironmentStore(database, HERE)
        with pytest.warns(UserWarning, match="its measurements are not stored"):
            store.add_confirmation(MODEL, NEWER, None)
        known = store.confirmation(MODEL)
    assert known is not None
    assert known[1] == FOUND
