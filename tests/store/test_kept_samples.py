"""Samples in the database: exact, wherever a row goes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.database_rows import FAST, HERE, PROBLEM, VERIFIED, VERSIONS, fill

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.records import MicroConfig
from mucudnn.store.database import Database
from mucudnn.store.schema import packed, unpacked
from mucudnn.store.tuning_store import CopyingDatabase

SECONDS = st.lists(st.floats(min_value=0, allow_infinity=False), min_size=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return fill(tmp_path / "full.sqlite")


def readable(value: object) -> object:
    return unpacked(value) if isinstance(value, bytes) else value


def kept_in(database: Database) -> list[dict[str, Any]]:
    """What rows have of samples, by kind."""
    names = ("setup_samples_s", "step_samples_s", "baseline_samples_s", "time_samples_s")
    return [{"kind": row["kind"]} | {name: readable(row[name]) for name in names} for row in database.every_row()]


NOTHING = dict.fromkeys(("setup_samples_s", "step_samples_s", "baseline_samples_s", "time_samples_s"))
KEPT = [
    {
        **{"kind": "measurement", **NOTHING},
        **{"setup_samples_s": [*FAST.setup_samples_s], "step_samples_s": [*FAST.step_samples_s]},
    },
    {"kind": "failure", **NOTHING},
    {
        **{"kind": "verification", **NOTHING},
        **{"baseline_samples_s": [*VERIFIED.baseline_samples_s], "time_samples_s": [*VERIFIED.time_samples_s]},
    },
]


@given(SECONDS)
def test_samples_come_back_to_the_last_bit(samples: list[float]) -> None:
    assert unpacked(packed("samples", samples)) == samples
    assert len(packed("samples", samples)) == 8 * len(samples)


@given(SECONDS, st.sampled_from([nan, inf, -inf, -1e-300, None, "1", 10**400]), st.data())
def test_a_sample_that_cannot_be_is_found_wherever_it_stands(
    samples: list[float], bad: float, data: st.DataObject
) -> None:
    samples.insert(data.draw(st.integers(0, len(samples))), bad)
    with pytest.raises(InvalidInputError, match="it must be seconds, each finite and at least 0"):
        packed("samples", samples)


def test_ranks_pass_them_along(path: Path, tmp_path: Path) -> None:
    """What one rank measured, another one has in memory and in its file."""
    added = replace(FAST, micro_config=MicroConfig("gemm", 2))
    with Database(path) as own_file, Database(tmp_path / "other.sqlite") as other_file:
        with closing(CopyingDatabase(own_file)) as own, closing(CopyingDatabase(other_file)) as other:
            own.add(HERE, PROBLEM, 1, added)
            other.take(own.fresh_rows(), copies=True)
            assert kept_in(own) == [*KEPT, KEPT[0]]
            assert kept_in(other) == [KEPT[0]]
        assert kept_in(other_file) == [KEPT[0]]


def test_samples_are_kept_with_their_row_and_not_read_to_choose(path: Path) -> None:
    with Database(path, read_only=True) as database:
        assert kept_in(database) == KEPT
        (measured,) = database.measurements(HERE, PROBLEM, VERSIONS)
        run = database.whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS)
    assert run is not None
    assert measured.step_samples_s == run.time_samples_s == ()
