"""Random problems x algorithms x splits x thread counts, between guard zones, against float64.

A seed that once failed is kept in ``data/failed_problems.txt``, and always runs first. One alone:
``MUCUDNN_FUZZ_SEED=123 pytest tests/kernels/test_fuzz_problems.py``.
"""

from __future__ import annotations

import os

import pytest
from support.effort import how_many
from support.places import DATA
from support.problems.random_problems import Case, case

from mucudnn.words.config import DEFAULT_MAX_RELATIVE_ERROR

KEPT = DATA / "failed_problems.txt"
LOOSER = {"winograd-6x6": 10.0}  # as their points are; the default error bound bars them
CHUNK = 100  # cases of one test: a failing one names its seed


def seeds() -> list[list[int]]:
    """Those that failed once, then as many as are asked for; or the one of ``MUCUDNN_FUZZ_SEED``."""
    if one := os.environ.get("MUCUDNN_FUZZ_SEED"):
        return [[int(one)]]
    first, count = int(os.environ.get("MUCUDNN_FUZZ_FIRST", "0")), how_many(300, 10_000)
    kept = [int(line.split()[0]) for line in KEPT.read_text().splitlines() if line and not line.startswith("#")]
    drawn = range(first, first + count)
    return [kept, *(list(drawn[start : start + CHUNK]) for start in range(0, count, CHUNK))]


def why_wrong(tried: Case) -> str | None:
    """``None`` if the case is right."""
    bound = LOOSER.get(tried.algorithm.name, 1.0) * DEFAULT_MAX_RELATIVE_ERROR[tried.problem.dtype]
    try:
        tried.check(bound)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return None


@pytest.mark.fuzz
@pytest.mark.parametrize("chunk", seeds(), ids=lambda chunk: f"{chunk[0]}-{chunk[-1]}" if chunk else "kept")
def test_every_algorithm_computes_every_problem_within_its_buffers(chunk: list[int]) -> None:
    failed = {}
    for seed in chunk:
        if reason := why_wrong(tried := case(seed)):
            failed[seed] = f"{tried}: {reason}"
    lines = [f"seed {seed}: {what}" for seed, what in failed.items()]
    assert not failed, "\n".join([*lines, f"again: MUCUDNN_FUZZ_SEED={min(failed)} pytest -k test_fuzz_problems"])
