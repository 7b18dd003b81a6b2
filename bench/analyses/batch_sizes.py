"""Throughput by batch size."""

from __future__ import annotations

from collections.abc import Mapping

from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import InvalidInputError

ENOUGH = 0.8  # The device counts as underused below this share of its best throughput.


def require_sweepable(config: Config) -> None:
    """Raise ``InvalidInputError`` if the settings do not allow comparing batch sizes."""
    if config.workspace_budget is not None or config.has_headroom_limit:
        given = "a workspace budget" if config.workspace_budget is not None else "the headroom limit"
        raise InvalidInputError(f"{given} is valid at one batch size only; give a workspace limit, or none")
    if config.policy == BatchSizePolicy.UNDIVIDED:
        raise InvalidInputError(
            f"policy {config.policy} measures one batch size only, which is no curve; "
            f"choose {BatchSizePolicy.POWER_OF_TWO} or {BatchSizePolicy.ALL}"
        )


def starving_below(seconds: Mapping[int, float]) -> int:
    """Return the smallest batch size from which on a device reaches the share ``ENOUGH`` of its best throughput.

    seconds: time of a whole batch, by its number of samples; not empty.

    >>> starving_below({1: 4.0, 2: 4.0, 4: 4.0, 8: 6.0})  # 0.25, 0.5, 1 and 1.33 samples a second
    8
    """
    throughput = {n: n / seconds[n] for n in sorted(seconds)}
    starved = [n for n, reached in throughput.items() if reached < ENOUGH * max(throughput.values())]
    least = max(starved, default=0) + 1
    return min((n for n in throughput if n >= least), default=least)
