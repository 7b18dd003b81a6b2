"""How many random inputs and faults the tests of ``fuzz`` try: few in ``make test``, all of them in ``make fuzz``."""

from __future__ import annotations

import os

IS_FULL = os.environ.get("MUCUDNN_FUZZ") == "full"


def how_many(few: int, full: int) -> int:
    """``few`` in ``make test``, which must end in minutes; ``full`` under ``MUCUDNN_FUZZ=full``."""
    return full if IS_FULL else few
