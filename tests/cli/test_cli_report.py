"""``mucudnn report``, as users call it."""

from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import pandas
import pytest
from support.command_line import fail, invoke
from support.result_folders import MIB, training_layers, write_random_folder
from support.tables_of_page import PageParser

from mucudnn.bench.results.pages import page
from mucudnn.bench.results.pages.page import html_of, report_of, reports_in
from mucudnn.bench.results.pages.pictures import KINDS
from mucudnn.bench.results.reading import read_folder

NAMES = ("nets/<i>a", "training")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_folder(tmp_path / "folder", training_layers(3), limits=(8 * MIB,), rounds=3)


def invoke_well(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_report_writes_what_is_asked_for(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page, table = tmp_path / "page.html", tmp_path / "table.csv"
    output = invoke_well("report", folder, "--html", page, "--csv", table)
    assert "speedup" in page.read_text()
    with table.open() as stream:
        assert len(list(csv.DictReader(stream))) == 3 * 3
    with (tmp_path / "table-operations.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == 3 * 3 * 3
    assert "mucudnn" in output


def test_pictures_are_written_as_files(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = invoke_well("report", folder, "--pictures", tmp_path / "new" / "pictures")
    for kind in KINDS:
        path = tmp_path / "new" / "pictures" / f"{kind}.svg"
        assert ElementTree.parse(path).getroot().tag == f"{SVG}svg"
        assert str(path) in output


def test_what_a_folder_lacks_for_a_picture_is_not_drawn(every: Path, tmp_path: Path) -> None:
    """Folders of before have no candidates; each of several folders has its own pictures."""
    pytest.importorskip("matplotlib")
    invoke_well("report", every, "--pictures", tmp_path / "pictures")
    found = {path.relative_to(tmp_path / "pictures") for path in (tmp_path / "pictures").rglob("*.svg")}
    assert found == {Path(name) / f"{kind}.svg" for name in NAMES for kind in ("speedups", "divided", "limits")}


@pytest.fixture
def every(tmp_path: Path) -> Path:
    for seed, name in enumerate(NAMES):
        write_random_folder(
            tmp_path / "all" / name,
            training_layers(seed + 1),
            limits=(8 * MIB,),
            rounds=2,
            seed=seed,
            candidates=False,
        )
    return tmp_path / "all"


def test_the_page_has_the_tables_of_each_folder(every: Path) -> None:
    pytest.importorskip("jinja2")
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
    pytest.importorskip("jinja2")
    monkeypatch.setattr(page, "drawn", lambda folder, rows: ())
    (every / "old").mkdir()
    (every / "old" / "environment.json").write_text('{"format_version": 0}')
    files = [tmp_path / name for name in ("all.html", "all.csv")]
    output = invoke_well("report", every, "--html", files[0], "--csv", files[1])
    for shown in (output, PageParser(files[0].read_text()).text):
        assert "format version 0" in shown
        assert all(name in shown for name in NAMES)
    layers, rows = (pandas.read_csv(path) for path in (files[1], tmp_path / "all-operations.csv"))
    for name in NAMES:
        found = report_of(read_folder(every / name))
        of = rows[rows["result_folder"] == name]
        assert of["time_s"].tolist() == pytest.approx(found.rows["time_s"].tolist())
        assert (layers["result_folder"] == name).sum() == len(found.layers)
    assert list(layers.columns[:2]) == ["result_folder", "layer"]


def test_a_folder_with_nothing_that_can_be_read_is_refused(tmp_path: Path) -> None:
    assert "environment.json does not exist" in fail("report", tmp_path)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "environment.json").write_text("{")
    assert "half/environment.json, line 1: invalid JSON" in fail("report", tmp_path)
