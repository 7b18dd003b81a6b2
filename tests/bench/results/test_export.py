"""Records and rows are written as they are, each file whole, and one that fails stops no other."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path

import pytest

from mucudnn.core.errors import OutputError
from mucudnn.core.files import write_csv, write_each, write_json


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
