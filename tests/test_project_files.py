"""Files beside the code that repeat a fact of it: versions, Pythons and the oldest torch are the same everywhere."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import mucudnn

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_tool_of_development_is_pinned() -> None:
    pinned = {canonical(name) for name in PINNED}
    extras = PROJECT["optional-dependencies"]
    for requirement in (*PROJECT["dependencies"], *extras["test"], *extras["dev"], *extras["docs"]):
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        assert canonical(name[0]) in pinned


def test_every_folder_of_code_is_in_the_wheel() -> None:
    paths = [Path(folder) / name for folder, _, names in os.walk(ROOT / "mucudnn", followlinks=True) for name in names]
    folders = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in paths if path.suffix == ".py"}
    assert sorted(SETTINGS["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_commit_hooks_run_the_pinned_tools() -> None:
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")


def test_the_workflow_tests_every_python_that_is_named_and_the_oldest_torch_that_is_allowed() -> None:
    matrix = read(".github/workflows/checks.yml")["jobs"]["tests"]["strategy"]["matrix"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert matrix["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"
    (oldest,) = matrix["include"]
    assert f"torch>={oldest['torch'].removesuffix('.*')}" in PROJECT["dependencies"]
    assert oldest["python"] == named[0]


def test_the_workflow_runs_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = read(".github/workflows/checks.yml")["jobs"].values()
    run = {step["run"] for job in jobs for step in job["steps"] if step.get("run", "").startswith("make ")}
    assert run == {"make lint", "make .venv/.test", "make wheel", "make docs"}
    assert {command.removeprefix("make ") for command in run} <= targets | {".venv/.test"}


def test_what_is_cited_is_this_version() -> None:
    citation = read("CITATION.cff")
    assert citation["version"] == mucudnn.__version__ == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["references"][0]["url"] == PROJECT["urls"]["Paper"]


def test_the_issue_template_asks_for_the_machine() -> None:
    (asked,) = (part for part in read(".github/ISSUE_TEMPLATE/bug.yml")["body"] if part["id"] == "doctor")
    assert "`mucudnn doctor`" in asked["attributes"]["description"]
    assert asked["validations"]["required"] is True
