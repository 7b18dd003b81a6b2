"""Files of ``--json`` are read as folders are, with all samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import invoke
from support.result_folders import training_layers, write_random_folder

from mucudnn.bench.folders.reading import ResultFolder, read_folder, read_result_file
from mucudnn.bench.report.export import write_json
from mucudnn.words.errors import InvalidInputError


@pytest.fixture
def folder(tmp_path: Path) -> ResultFolder:
    return read_folder(write_random_folder(tmp_path / "folder", training_layers(2), limits=(2**20,), rounds=3))


def test_a_file_has_what_the_folder_has(folder: ResultFolder, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_json(file, folder.to_json())
    found = read_result_file(file)
    assert (found.header, found.lines, found.problems) == (folder.header, folder.lines, ())
    assert found.rows.equals(folder.rows)
    assert found.candidates == folder.candidates
    assert found.summary == folder.summary
    assert invoke("report", file).exit_code == 0


def test_what_is_no_such_file_is_refused(folder: ResultFolder, tmp_path: Path) -> None:
    file, whole = tmp_path / "result.json", folder.to_json()
    for change, told in (
        ({"format_version": 2}, "format version 2"),
        ({"rows": 7}, "is not the result of a benchmark"),
        ({"benchmark": None, "settings": 7}, "has an invalid value"),
        ({"summary": {"format_version": 1, "left_out": 3}}, "left_out is invalid"),
        *((key, f"{key}.*not the result of a benchmark") for key in ("benchmark", "rows", "candidates", "summary")),
    ):
        lacking = {name: value for name, value in whole.items() if name != change}
        file.write_text(json.dumps(lacking if isinstance(change, str) else {**whole, **change}))
        with pytest.raises(InvalidInputError, match=told):
            read_result_file(file)
