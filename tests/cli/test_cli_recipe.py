"""``mucudnn recipe``, as users call it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from support.command_line import fail, invoke, one_layer

from mucudnn.bench.recipes.recipe_file import shipped_recipes

RECIPE = """
figure = "speedups"
published = ["4.54x somewhere else"]
[fixed]
table = "{table}"
batch = 2
rounds = 2
algorithms = ["gemm"]
tuning_time = "50ms"
operations = ["forward"]
[mutable]
workspace_limit = ["1MiB"]
[accept]
error = {{ at_most = {error} }}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE.format(table=one_layer(tmp_path), error=1e-5))
    return path


def test_recipes_are_listed_and_shown() -> None:
    listed = invoke("recipe", "list")
    assert listed.exit_code == 0, listed.output
    for name, path in shipped_recipes().items():
        (line,) = (line for line in listed.output.splitlines() if f" {name} " in line)
        assert tomllib.loads(path.read_text())["takes"] in line
        shown = invoke("recipe", "show", name)
        assert shown.output == path.read_text()
        assert tomllib.loads(shown.output)["title"]


def test_a_recipe_runs_and_its_exit_status_is_the_judgement(recipe: Path, tmp_path: Path) -> None:
    out, database = tmp_path / "out", tmp_path / "m.sqlite"
    command = ("recipe", "run", recipe, "--out", out, "--database", database, "--threads", 1)
    first = invoke(*command)
    assert first.exit_code == 0, first.output
    assert "pass" in first.output
    assert "published elsewhere: 4.54x somewhere else" in first.output
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    measured = (folder / "rows.jsonl").read_bytes()
    recipe.write_text(recipe.read_text().replace("1e-05", "1e-30"))
    second = invoke(*command)
    assert second.exit_code == 1, second.output
    assert "FAIL" in second.output
    assert (folder / "rows.jsonl").read_bytes() == measured
    assert json.loads((out / "outcome.json").read_text())["passed"] is False
    assert (out / "recipe.toml").read_text() == recipe.read_text()
    assert invoke("report", folder).exit_code == 0


def test_faults_are_told(recipe: Path, tmp_path: Path) -> None:
    assert "did you mean three-policies?" in fail("recipe", "run", "three-policy", "--out", tmp_path / "out")
    recipe.write_text(recipe.read_text().replace("batch = 2", "batch = -2"))
    assert "mine.toml, line 6: [fixed] batch is -2; it must be at least 1" in fail(
        "recipe", "run", recipe, "--out", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()
