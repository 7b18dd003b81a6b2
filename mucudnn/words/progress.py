"""The callback that long work calls while it goes on."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is being done, and with the fraction that is done, from 0 to 1."""
