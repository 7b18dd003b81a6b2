"""The page of a result folder: what can be shown is shown, what cannot is told, and text of the folder stays text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.clock.machine import ENVIRONMENT
from support.result_folders import MIB, training_layers, write_random_folder
from support.tables_of_page import PageParser

from mucudnn.bench.results.pages.page import html_of, reports_in, settings_of
from mucudnn.bench.results.pages.pictures import KINDS
from mucudnn.bench.results.reading import MEASUREMENTS_FILE, Header, read_folder
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.bench.sources.layers import Layer
from mucudnn.core.errors import UnavailableError

pytest.importorskip("jinja2")
EVIL = "<script>alert('x')</script> & $\\frac{1}{0}$ \x1b[31m"


def page_of(path: Path, *, with_pictures: bool = False) -> str:
    return html_of(reports_in(path), with_pictures=with_pictures)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_folder(tmp_path / "folder", training_layers(2), limits=(8 * MIB,), rounds=3)


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change every row of the folder."""
    path = folder / "rows.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_text_of_the_folder_is_text_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    layers = [Layer((f"{EVIL}{number}",), one.problem, 2) for number, one in enumerate(training_layers(2))]
    path = write_random_folder(tmp_path / "a<b>&", layers, limits=(8 * MIB,), left_out=[(EVIL, EVIL)], rounds=3)
    header = json.loads((path / "environment.json").read_text())
    header["environment"]["device"] = header["source"] = header["settings"]["<i>"] = EVIL
    (path / "environment.json").write_text(json.dumps(header))
    measured = [json.loads(line) | {"device": EVIL} for line in (path / MEASUREMENTS_FILE).read_text().splitlines()]
    (path / MEASUREMENTS_FILE).write_text("\n".join(map(json.dumps, measured)))
    page = page_of(path, with_pictures=True)
    parsed = PageParser(page)
    scripts = [attributes.get("type") for tag, attributes in parsed.elements if tag == "script"]
    assert scripts == [None]  # the page's own
    assert not any(tag in ("b", "i") for tag, _ in parsed.elements)
    assert f"{EVIL}0" in parsed.tables["operations"].rows[0]
    assert parsed.text.count("alert('x')") > 20
    assert page.count("<img ") == len(KINDS)
    assert parsed.loose_ends() == []
    assert not re.search(r"@import|url\((?!#)", page)


def test_what_is_not_installed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = PageParser(page_of(folder, with_pictures=True))
    assert "There are no pictures" in page.text
    assert "pip install matplotlib" in page.text
    assert page.tables["operations"].rows
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnavailableError, match="pip install jinja2"):
        page_of(folder)


def test_what_was_left_out_is_told_with_its_reason(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    summary["left_out"] = [{"what": "conv9, forward", "reason": "the 10 s would not have sufficed"}]
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "rows.jsonl").open("a") as stream:
        stream.write('{"half": ')
    text = PageParser(page_of(folder)).text
    assert "conv9, forward" in text
    assert "not measured: the 10 s would not have sufficed" in text
    assert "rows.jsonl, line 19: incomplete" in text


def test_a_folder_without_rows_has_a_page(tmp_path: Path) -> None:
    folder = write_random_folder(tmp_path / "folder", ())
    (folder / "rows.jsonl").unlink()
    page = PageParser(page_of(folder, with_pictures=True))
    assert page.tables == {}
    assert "has no row that can be shown" in page.text


def test_a_configuration_that_is_the_undivided_one_has_one_row(folder: Path) -> None:
    samples: dict[tuple[int, int], list[float]] = {}

    def undivided(line: dict[str, Any]) -> None:
        turns = line["turns"], line["limit_bytes"]
        if line["contestant"] == "undivided":
            samples[turns] = line["samples_s"]
        elif line["contestant"] == "mucudnn" and (line["turns"] == 1 or line["turns"] > 3):
            line["configuration"], line["samples_s"] = f"winograd-4x4 {line['batch_size']}", samples[turns]

    edited(folder, undivided)
    tables, title = PageParser(page_of(folder)).tables, "configuration: same configuration, timed once"
    marked = [row["subject: layer"] + row["subject: operation"] for row in tables["operations"].records() if row[title]]
    first, second = (layer.name for layer in training_layers(2))
    assert len(marked) == 4
    assert marked[0].startswith(first)
    (layer,) = [row for row in tables["layers"].records() if row[title]]  # where all operations are
    assert (layer["layer: layer"], layer["contestant: contestant"]) == (second, "undivided")
    assert layer[title].startswith("mucudnn, power-of-two, ")
    assert len([row for row in tables["layers"].records() if row["layer: layer"] == second]) == 2


def test_failures_have_rows_that_say_why(folder: Path) -> None:
    """Of ours, and then of torch, without which nothing has a speedup."""

    def fail(contestant: str) -> PageParser:
        failed = {"samples_s": [], "failure": "out of <memory>"}
        edited(folder, lambda line: line.update(failed if line["contestant"] == contestant else {}))
        return PageParser(page_of(folder))

    page = fail("mucudnn")
    failed = [row for row in page.tables["operations"].records() if row["contestant: contestant"] == "mucudnn"]
    assert len(failed) == 6
    for row in failed:
        assert row["no time: why there is none"] == "out of <memory>"
        assert row["time: median, ms"] == row["speedup, 95 % interval: speedup over PyTorch"] == ""
    assert "6 rows have no samples" in page.text
    titles = fail("torch").tables["operations"].titles
    assert "speedup over PyTorch" not in titles
    assert "median, ms" in titles


def test_settings_are_told_as_users_know_them_and_unknown_machine_limits_too(folder: Path) -> None:
    header = json.loads((folder / "environment.json").read_text())
    header["machine_limits"] = {}
    header["settings"] |= {"algorithms": None, "max_relative_error": None, "time_limit": "2s", "strict": False}
    (folder / "environment.json").write_text(json.dumps(header))
    settings = settings_of(read_folder(folder))
    assert settings["algorithms"] == "all"
    assert settings["max relative error"] == "auto"
    assert settings["most measuring for each problem"] == "2s"
    page = PageParser(page_of(folder))
    assert "limits were not measured" in page.text
    assert "time / bound" not in page.tables["operations"].titles


def test_a_summary_of_a_busy_machine_says_so_beside_its_numbers(folder: Path) -> None:
    title = "speedup over PyTorch, geometric mean: timed on a busy machine"
    edited(folder, lambda line: line.update(load=0.0))
    assert title not in PageParser(page_of(folder)).tables["summary"].records()[0]
    edited(folder, lambda line: line.update(load=0.5 if line["turns"] == 2 else 0.0))
    assert [row[title] for row in PageParser(page_of(folder)).tables["summary"].records()] == ["1"] * 3


def test_benchmarks_without_convolutions_have_their_own_subjects(tmp_path: Path) -> None:
    header = Header("training", "a net", {}, ENVIRONMENT, subject_columns=("network", "batch_size", "dtype"), wanted=1)
    with open_folder(tmp_path / "folder", header) as folder:
        subject = {"network": "alexnet", "batch_size": 8, "dtype": "float32"}
        every = [Row(subject, "torch", (0.3, 0.31, 0.32)), Row(subject, "mucudnn", (0.1, 0.11, 0.12))]
        more = {"peak_bytes": 3 * 2**20, "kinds_s": {"3x3": 0.3, "rest": 0.1}, "bound": "headroom", "alone_s": 0.25}
        folder.add([replace(row, more=more) for row in every])
        folder.write_summary()
    page = page_of(tmp_path / "folder")
    (_, ours) = PageParser(page).tables["operations"].records()
    subjects = {name: text for name, text in ours.items() if name.startswith("subject")}
    assert subjects == {"subject: network": "alexnet", "subject: batch size": "8", "subject: dtype": "float32"}
    assert ours["speedup, 95 % interval: speedup over PyTorch"] == f"{0.31 / 0.11:.3f}"
    assert "layers" not in PageParser(page).tables
    assert (ours["whole model: images/s"], ours["more: bound"]) == (f"{8 / 0.11:.4g}", "headroom")
    assert (ours["more: peak, MiB"], ours["more: alone, ms"]) == ("3.000", "250.0000")
    assert ours["whole model: share of time by kind of layer"] == "3x3 75%, rest 25%"


def test_speedups_are_over_torch_in_the_same_memory_format(tmp_path: Path) -> None:
    """All memory formats of a layer are timed in the same turns."""
    header = Header("network", "a net", {}, ENVIRONMENT, subject_columns=("layer", "memory_format"), wanted=2)
    torch_s = {"contiguous": 0.4, "channels_last": 0.2}
    with open_folder(tmp_path / "folder", header) as folder:
        subjects = [({"layer": "conv", "memory_format": name}, time_s) for name, time_s in torch_s.items()]
        folder.add([Row(of, *row) for of, s in subjects for row in (("torch", (s,) * 3), ("mucudnn", (0.1,) * 3))])
        folder.write_summary()
    tables = PageParser(page_of(tmp_path / "folder")).tables
    speedups = [row["speedup, 95 % interval: speedup over PyTorch"] for row in tables["operations"].records()]
    assert speedups == ["", "4.000", "", "2.000"]
    _, ours = tables["summary"].records()
    assert ours["speedup over PyTorch, geometric mean: speedup"] == f"{8**0.5:.3f}"
    assert ours["sum of times: PyTorch for the same, ms"] == "600.0000"
