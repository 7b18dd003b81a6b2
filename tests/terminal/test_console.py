"""Progress of commands: without a terminal, lines on standard error."""

import io
import sys
from threading import Event
from typing import cast

import pytest

from mucudnn.terminal import console


class _Lines(io.StringIO):
    """Standard error that is no terminal, and says when a line of the second step is there."""

    def __init__(self) -> None:
        super().__init__()
        self.has_second = Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "conv2" in self.getvalue() and self.getvalue().endswith("\n"):
            self.has_second.set()
        return written


def test_without_a_terminal_lines_say_what_is_done_also_while_the_work_reports_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.001)
    monkeypatch.setattr(sys, "stderr", _Lines())
    stream = cast("_Lines", sys.stderr)
    with console.progress_bar() as progress:
        progress("conv1: measuring", 0.25)
        progress("conv2: measuring", 0.5)
        assert stream.has_second.wait(60), stream.getvalue()
    *_, last = stream.getvalue().splitlines()
    assert last.startswith(" 50% after ")
    assert last.endswith(": conv2: measuring")


def test_short_work_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress_bar() as progress:
        progress("conv1: measuring", 0.25)
    assert capsys.readouterr().err == ""
