"""Random geometries, tuned and run in child processes under checks of the heap: none dies, hangs or is wrong.

One alone: ``MUCUDNN_FUZZ_SEED=123 pytest tests/tuning/test_fuzz_tuned.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.effort import how_many

from mucudnn.measuring.proving.prover import checked_environment

pytestmark = pytest.mark.slow

CHUNK = 100
TESTS = Path(__file__).parents[1]


def chunks() -> list[range]:
    if one := os.environ.get("MUCUDNN_FUZZ_SEED"):
        return [range(int(one), int(one) + 1)]
    first, count = int(os.environ.get("MUCUDNN_FUZZ_FIRST", "0")), how_many(8, 5_000)
    return [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]


def run(seeds: range) -> tuple[list[str], int, str]:
    """Run a child on these; returns its lines, its exit status and the last line of its standard error."""
    command = [sys.executable, "-m", "support.tuned_geometries", str(seeds.start), str(seeds.stop)]
    environment = {**checked_environment(), "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    return done.stdout.splitlines(), done.returncode, done.stderr.strip().rpartition("\n")[2]


@pytest.mark.fuzz
@pytest.mark.parametrize("seeds", chunks(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_what_is_tuned_runs_right_and_ends_no_process(seeds: range) -> None:
    failed, left = [], seeds
    while left:
        lines, status, said = run(left)
        failed += [line for line in lines if " wrong " in line]
        if status == 0:
            break
        assert lines, said
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        failed.append(f"{lines[-1]}: {how}, {said}")
        left = range(int(lines[-1].split()[0]) + 1, seeds.stop)
    assert not failed, "\n".join(failed)
