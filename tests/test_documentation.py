"""The documentation: links that work in the repository, lines that fit, every public name on the page of the API."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mucudnn
import mucudnn.testing
from mucudnn.bench.sources.networks import NETWORKS
from mucudnn.bench.sources.published import TABLES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
each_page = pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])


@each_page
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).is_file(), target


@each_page
def test_prose_has_at_most_120_columns(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    shown = re.findall(r"^::: mucudnn\.([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    others = [f"testing.{name}" for name in mucudnn.testing.__all__]
    assert sorted(shown) == sorted([*mucudnn.__all__, *others])


def test_the_page_of_commands_names_every_network_and_table() -> None:
    named = set(re.findall(r"`([\w-]+)`", (ROOT / "docs" / "commands.md").read_text()))
    assert named >= {*NETWORKS, *TABLES}
