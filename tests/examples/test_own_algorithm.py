"""The example of an own algorithm, installed as its README says, in processes that know nothing of it but that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import EXAMPLES

pytestmark = pytest.mark.slow

FOLDER = EXAMPLES / "own_algorithm"
NAME = "own/pointwise"
TUNED = f"""
import torch, mucudnn
config = mucudnn.Config(algorithms="{NAME}", operations="forward", workspace_limit="1MiB")
problem = mucudnn.ConvProblem("forward", 16, 7, 7, 16, 1, 1)
(tuned,) = mucudnn.tune(problem, 4, config).problems
print(*sorted({{m.micro_config.algorithm for m in tuned.measurements}}), *tuned.failures)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example is installed: a folder of its own, from a copy, without the network."""
    copy, target = tmp_path_factory.mktemp("copy") / "own_algorithm", tmp_path_factory.mktemp("installed")
    shutil.copytree(FOLDER, copy)
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, copy], check=True)
    return target


def run(arguments: list[str], folder: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": places, "MUCUDNN_DATABASE": str(folder / "measurements.sqlite")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def output(arguments: list[str], folder: Path, *path: Path) -> str:
    done = run(arguments, folder, *path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_one_file_of_less_than_80_lines_that_keeps_the_contract(installed: Path, tmp_path: Path) -> None:
    assert len((FOLDER / "own_algorithm.py").read_text().splitlines()) < 80
    checked = "from own_algorithm import ALGORITHM\nfrom mucudnn.testing import check_algorithm\n"
    passed = output(["-c", f"{checked}print(check_algorithm(ALGORITHM, random_problems=20))"], tmp_path, installed)
    assert int(passed) > 50


def test_doctor_lists_it_and_the_package_that_brings_it(installed: Path, tmp_path: Path) -> None:
    told = output(["-m", "mucudnn", "doctor"], tmp_path, installed)
    assert "own-algorithm 0.1" in told
    assert told.count(NAME) == 2  # among the algorithms, and with the package that brings it
    assert NAME not in output(["-m", "mucudnn", "doctor"], tmp_path)


def test_it_is_measured_and_stored_where_it_is_asked_for_and_known_elsewhere(installed: Path, tmp_path: Path) -> None:
    assert output(["-c", TUNED], tmp_path, installed).split() == ["native", NAME]
    stored = output(["-m", "mucudnn", "database", "export", "--database", "measurements.sqlite", "all.jsonl"], tmp_path)
    assert stored is not None
    assert f'"algorithm": "{NAME}"' in (tmp_path / "all.jsonl").read_text()
    without = run(["-c", TUNED], tmp_path)
    assert without.returncode == 1
    assert f"algorithms has {NAME}; this machine has native, " in without.stderr
