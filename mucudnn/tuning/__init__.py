"""Tunes: measures what is not known, and chooses configurations.

Timers are in ``mucudnn/measuring``, the mathematics in ``solver``; ``optimizing`` puts the choices into models.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_IN_RESULT = ("LeftOut", "TunedProblem", "Tuning", "TuningInterrupted")


def __getattr__(name: str) -> Any:
    """Return what pickles of version 0.1.0 look for here; it lives in ``result`` now."""
    if name not in _IN_RESULT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.result"), name)
