"""``mucudnn report`` and ``mucudnn plot``, as users call them."""

from __future__ import annotations

import csv
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from support.result_folders import MIB, training_layers, write_random_folder

from mucudnn.bench.pages.kinds import KINDS
from mucudnn.cli.main import main

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_folder(tmp_path / "folder", training_layers(3), limits=(8 * MIB,), rounds=3)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_report_writes_what_is_asked_for(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page, table = tmp_path / "page.html", tmp_path / "table.csv"
    result = run("report", folder, "--html", page, "--csv", table)
    assert result.exit_code == 0, result.output
    assert "speedup" in page.read_text()
    with table.open() as stream:
        assert len(list(csv.DictReader(stream))) == 3 * 3
    with (tmp_path / "table-operations.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == 3 * 3 * 3
    assert "mucudnn" in result.output
    assert "published times: 87 of the 90 layers" in result.output


def test_markdown_goes_to_standard_output(folder: Path) -> None:
    result = run("report", folder, "--markdown")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("# deepbench: deepbench-train")
    assert "\n## Layers\n" in result.output


def test_no_file_of_the_results_is_overwritten(folder: Path) -> None:
    before = (folder / "rows.jsonl").read_bytes()
    result = run("report", folder, "--csv", folder / "rows.jsonl")
    assert result.exit_code == 2
    assert "is in the folder of the results" in result.output
    assert (folder / "rows.jsonl").read_bytes() == before


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    assert "no folder" in run("report", tmp_path / "nothing").output
    result = run("report", tmp_path)
    assert result.exit_code == 2
    assert "environment.json is not there" in result.output


@pytest.mark.parametrize(("kind", "suffix"), [*((kind, "svg") for kind in KINDS), ("tuning", "png")])
def test_plot_draws_each_kind(tmp_path: Path, kind: str, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{suffix}"
    settings = {"workspace_budget": "64MiB"}
    folder = write_random_folder(tmp_path / "one", training_layers(1), limits=(8 * MIB,), rounds=3, settings=settings)
    result = run("plot", kind, folder, "--out", path)
    assert result.exit_code == 0, result.output
    if suffix == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        assert ElementTree.parse(path).getroot().tag == f"{SVG}svg"


def test_plot_of_one_layer_has_no_other(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = [layer.name for layer in training_layers(3)]
    path = tmp_path / "picture.svg"
    assert run("plot", "samples", folder, "--out", path, "--layer", names[1]).exit_code == 0
    texts = "\n".join("".join(text.itertext()) for text in ElementTree.parse(path).getroot().iter(f"{SVG}text"))
    assert f"{names[1]} forward" in texts
    assert names[0] not in texts


def test_a_layer_that_is_not_there_is_told(folder: Path, tmp_path: Path) -> None:
    result = run("plot", "samples", folder, "--out", tmp_path / "picture.svg", "--layer", "conv99")
    assert result.exit_code == 2
    assert "has no layer 'conv99'" in result.output


def test_the_file_says_what_is_drawn(folder: Path, tmp_path: Path) -> None:
    result = run("plot", "samples", folder, "--out", tmp_path / "picture.pdf")
    assert result.exit_code == 2
    assert "not a PNG or SVG file; name one that ends in .png or .svg" in result.output


def test_what_a_folder_lacks_for_a_picture_is_told(tmp_path: Path) -> None:
    """Folders of before have no candidates."""
    pytest.importorskip("matplotlib")
    folder = write_random_folder(tmp_path / "old", training_layers(1), rounds=3, candidates=False)
    for kind in ("desirable", "micro-batches", "algorithms", "errors", "budget"):
        result = run("plot", kind, folder, "--out", tmp_path / "picture.svg")
        assert result.exit_code == 2
        assert "candidates.jsonl" in " ".join(result.output.split())
    assert not (tmp_path / "picture.svg").exists()


def test_the_help_lists_all_kinds() -> None:
    output = run("plot", "--help").output
    for name, kind in KINDS.items():
        assert f"{name} " in output
        assert kind.summary in output
