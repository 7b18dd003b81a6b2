"""How many random inputs and faults the tests of ``fuzz`` try: few in ``make test``, all of them in ``make fuzz``."""

from __future__ import annotations

import os

IS_FULL = os.environ.get("MUCUDNN_FUZZ") == "full"


def how_many(few: int, full: int) -> int:
    """``few`` in ``make test``, which must end in minutes; ``full`` under ``MUCUDNN_FUZZ=full``."""
    return full if IS_FULL else few


def seeds(few: int, full: int) -> range:
    """Return the seeds to try: as many as ``how_many`` says from 0 on, unless the environment says others.

    ``MUCUDNN_FUZZ_SEED`` is the only seed, ``MUCUDNN_FUZZ_FIRST`` the first, ``MUCUDNN_FUZZ_COUNT`` how many they are.
    """
    if seed := os.environ.get("MUCUDNN_FUZZ_SEED"):
        return range(int(seed), int(seed) + 1)
    first = int(os.environ.get("MUCUDNN_FUZZ_FIRST", "0"))
    return range(first, first + int(os.environ.get("MUCUDNN_FUZZ_COUNT", how_many(few, full))))
