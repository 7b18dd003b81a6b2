"""The examples of searches: several processes share one database, and a second search measures nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import EXAMPLES

pytestmark = pytest.mark.slow

pytest.importorskip("sklearn")
LIMIT_S = 600  # several processes load all of torch, on cores that they share with other tests


def last_line(script: str, folder: Path) -> str:
    command = [sys.executable, EXAMPLES / script, "--folder", folder, "--trials", "2", "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "best accuracy" in done.stdout
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("script", "package"), [("search_optuna.py", "optuna"), ("search_ray.py", "ray")])
def test_a_second_search_measures_nothing(script: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    first, second = last_line(script, tmp_path), last_line(script, tmp_path)
    assert "2 tunings measured" in first
    assert "0 tunings measured 0 results; 2 measured nothing" in second
