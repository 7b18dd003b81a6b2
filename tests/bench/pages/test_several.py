"""Several result folders in one report: each is in it, its numbers are its own, and what cannot be read is told."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
from support.command_line import fail, invoke
from support.result_folders import MIB, training_layers, write_random_folder
from support.tables_of_page import PageParser

from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.pages import reports
from mucudnn.bench.pages.report import report_of
from mucudnn.bench.pages.reports import html_of, reports_in

pytest.importorskip("jinja2")
NAMES = ("nets/<i>a", "nets/b", "training")


@pytest.fixture
def every(tmp_path: Path) -> Path:
    for seed, name in enumerate(NAMES):
        write_random_folder(
            tmp_path / "all" / name,
            training_layers(seed // 2 + 1),
            limits=(8 * MIB,),
            rounds=2,
            seed=seed,
            candidates=False,
        )
    return tmp_path / "all"


def test_the_page_has_the_tables_of_each_folder(every: Path) -> None:
    pytest.importorskip("matplotlib")
    parsed = PageParser(html_of(reports_in(every)))
    for number, name in enumerate(NAMES, start=1):
        alone = PageParser(html_of(reports_in(every / name), with_pictures=False)).tables
        for identity, table in alone.items():
            assert parsed.tables[f"folder-{number}-{identity}"].rows == table.rows
    assert len(parsed.tables) == 3 * len(NAMES)
    assert not any(tag == "i" for tag, _ in parsed.elements)
    assert parsed.loose_ends() == []


def test_the_command_shows_all_and_tells_what_it_cannot_read(
    every: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "pictures_or_reason", lambda report: ([], "drawn elsewhere"))
    (every / "old").mkdir()
    (every / "old" / "environment.json").write_text('{"format_version": 0}')
    files = [tmp_path / name for name in ("all.html", "all.csv")]
    result = invoke("report", every, "--html", files[0], "--csv", files[1])
    assert result.exit_code == 0, result.output
    for shown in (result.output, PageParser(files[0].read_text()).text, invoke("report", every, "--markdown").output):
        assert "format version 0" in shown.replace("\\", "")
        assert all(name in shown.replace("\\", "") for name in NAMES)
    layers, rows = (pandas.read_csv(path) for path in (files[1], tmp_path / "all-operations.csv"))
    for name in NAMES:
        found = report_of(read_folder(every / name))
        of = rows[rows["result_folder"] == name]
        assert of["time_s"].tolist() == pytest.approx(found.rows["time_s"].tolist())
        assert (layers["result_folder"] == name).sum() == len(found.layers)
    assert list(layers.columns[:2]) == ["result_folder", "layer"]


def test_a_folder_with_nothing_that_can_be_read_is_refused(tmp_path: Path) -> None:
    assert "environment.json is not there" in fail("report", tmp_path)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "environment.json").write_text("{")
    assert "half/environment.json, line 1: no JSON" in fail("report", tmp_path)


def test_a_file_that_is_no_result_is_told_what_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("import torch\n")
    told = fail("report", path)
    assert "half-written" not in told
    assert "own.py, line 1: no result of a benchmark: name a folder that it wrote with --out" in told
