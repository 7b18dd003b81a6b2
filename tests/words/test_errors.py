"""Errors, told."""

from __future__ import annotations

from mucudnn.words.errors import first_line


def test_the_first_line_says_what_happened() -> None:
    assert first_line(RuntimeError("out of memory\na stack trace")) == "out of memory"
    assert first_line(RuntimeError()) == "RuntimeError"
