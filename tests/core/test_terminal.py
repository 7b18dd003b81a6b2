"""Progress: a bar on terminals, lines elsewhere, nothing if it is silenced."""

from __future__ import annotations

import io
import sys
import warnings
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch

import mucudnn
from mucudnn.core import terminal as module
from mucudnn.core.errors import warn
from mucudnn.core.terminal import progress_bar, progress_of


class Stream(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


def shown(monkeypatch: pytest.MonkeyPatch, progress: Any, *, is_terminal: bool) -> str:
    stream = Stream(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    config = mucudnn.Config(time_limit="1ms", algorithms="gemm", operations="forward")
    mucudnn.optimize(torch.nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 2, 2), config, progress=progress)
    return stream.getvalue()


def test_optimize_shows_a_bar_on_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert "done" in shown(monkeypatch, None, is_terminal=True)
    assert shown(monkeypatch, None, is_terminal=False) == ""
    assert shown(monkeypatch, False, is_terminal=True) == ""
    told: list[str] = []
    assert shown(monkeypatch, lambda text, fraction: told.append(text), is_terminal=True) == ""
    assert any("finding algorithms" in text for text in told)
    monkeypatch.setenv("RANK", "1")
    assert shown(monkeypatch, None, is_terminal=True) == ""


def test_progress_must_be_callable() -> None:
    with pytest.raises(mucudnn.InvalidInputError, match="progress is 3; give a function of a text"), progress_of(3):  # type: ignore[arg-type]
        pass


def test_lines_say_what_is_done_also_while_the_work_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    has_second, stream = Event(), Stream(is_terminal=False)

    def write(text: str) -> int:
        written = io.StringIO.write(stream, text)
        if text == "\n" and "conv2" in stream.getvalue():
            has_second.set()
        return written

    stream.write = write  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar() as progress:
        progress("conv1: measuring", 0.25)
    assert stream.getvalue() == "", "short work prints nothing"
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.001)
    with progress_bar() as progress:
        progress("conv1: measuring", 0.25)
        progress("conv2: measuring", 0.5)
        assert has_second.wait(60), stream.getvalue()
    *_, last = stream.getvalue().splitlines()
    assert last.startswith(" 50% after ")
    assert last.endswith(": conv2: measuring")


CLOSED = Stream(is_terminal=True)
CLOSED.close()
del CLOSED.isatty


@pytest.mark.parametrize("stream", [None, CLOSED, object()], ids=["none", "closed", "no stream"])
def test_without_standard_error_work_goes_on(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.001)
    with progress_bar() as move, progress_of(None):
        move("on", 0.5)
        sleep(0.01)
    monkeypatch.setattr(warnings, "showwarning", lambda *_: sys.stderr.write("as Python does"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warn("nobody reads this")
