"""A database in memory whose additions go into a file, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD

from mucudnn.core.records import Comparison, Configuration, Failure, Measurement, MicroConfig
from mucudnn.store.database import Database
from mucudnn.store.tuning_store import CopyingDatabase

VERSIONS = {"gemm": 1}
HERE = (ENVIRONMENT, FORWARD, 1)


def measured(n: int) -> Measurement:
    return Measurement(MicroConfig("gemm", n), 0.0, 1.0 * n, 0, 0, 0.0)


def sizes(database: Database) -> list[int]:
    return [m.micro_config.micro_batch_size for m in database.measurements(ENVIRONMENT, FORWARD, VERSIONS)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.sqlite"


@pytest.fixture
def file(path: Path) -> Iterator[Database]:
    with Database(path) as file:
        file.add(*HERE, measured(1))
        yield file


def test_it_has_what_the_file_has_and_adds_to_both_at_once(file: Database) -> None:
    with CopyingDatabase(file) as database:
        database.add(*HERE, measured(2))
        assert sizes(database) == sizes(file) == [1, 2]
        (row,) = database.fresh_rows()
        assert row["micro_batch_size"] == 2
        assert database.fresh_rows() == []


def test_everything_that_is_added_is_copied_with_its_time_stamp(file: Database) -> None:
    configuration = Configuration((MicroConfig("gemm", 2),), 1.0, 0)
    with CopyingDatabase(file) as database:
        database.add_failure(*HERE, Failure(MicroConfig("gemm", 3), "too slow"))
        database.add_whole_run(ENVIRONMENT, FORWARD, configuration.micro_configs, VERSIONS, Comparison(2.0, 1.0, 0.0))
        rows = [one.every_row(ENVIRONMENT) for one in (database, file)]
        assert rows[0] == rows[1]
        assert len(rows[0]) == 3


def test_rows_of_others_are_taken_and_copied_where_it_is_asked_for(file: Database, tmp_path: Path) -> None:
    with Database(tmp_path / "other.sqlite") as other, CopyingDatabase(file) as database:
        other.add(*HERE, measured(8))
        for copies in (False, True):
            rows = other.every_row(ENVIRONMENT, [FORWARD])
            database.take(rows, copies=copies)
            assert sizes(database) == [1, 8]
            assert sizes(file) == ([1, 8] if copies else [1])
            assert database.fresh_rows() == [], "others have them"


def test_a_file_that_cannot_be_written_is_left_alone_after_a_word(path: Path, file: Database) -> None:
    with Database(path, read_only=True) as unwritable:
        with pytest.warns(UserWarning, match="kept in memory only: database .* cannot be written"):
            database = CopyingDatabase(unwritable)
        database.add(*HERE, measured(2))
        assert sizes(database) == [1, 2]
        assert sizes(file) == [1]
        database.close()
