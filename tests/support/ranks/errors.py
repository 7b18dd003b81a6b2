"""What a call on a rank failed with, in words that can be sent and compared."""

from __future__ import annotations

from collections.abc import Callable


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"
