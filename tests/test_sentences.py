"""Every docstring begins with a noun or a verb, stands by itself, and ends its first paragraph with a full stop."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from support.places import TESTS

ROOT = TESTS.parent
FOLDERS = ("mucudnn", "kernels", "solver", "bench")
# Words that go on with a sentence that is not there.
IN_MID_SENTENCE = re.compile(
    "(Of|As|Those|That|This|These|What|Which|Whose|With|Without|Where|When|While|In|For|From|To|Between|So|Also|Like|"
    r"Under|By|On|At|It|They|Its|Their|Else|And|But|Or|If|Because|Since|How|Why|Than|Not|Only)\b"
)
QUESTION = "Whether "  # plain where something is true or false, a riddle elsewhere
HAVE_DOCSTRINGS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Docstring(NamedTuple):
    place: str
    text: str
    is_of_truth: bool


def docstrings(source: str, name: str) -> Iterator[Docstring]:
    """All of a module, its classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, HAVE_DOCSTRINGS) and (text := ast.get_docstring(node)) is not None:
            returned = getattr(node, "returns", None) or ast.Constant(None)
            yield Docstring(f"{name}:{node.body[0].lineno}", text, "bool" in ast.unparse(returned))


def faults(found: Docstring) -> Iterator[str]:
    first, paragraph = found.text.splitlines()[0], found.text.split("\n\n")[0]
    if IN_MID_SENTENCE.match(first) or (first.startswith(QUESTION) and not found.is_of_truth):
        yield f"{found.place} begins in mid-sentence: {first}"
    if not paragraph.rstrip(")").endswith("."):
        yield f"{found.place} does not end its first paragraph with a full stop: {first}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_are_sentences(folder: str) -> None:
    sources = sorted((ROOT / folder).rglob("*.py"))
    assert sources
    every = (d for path in sources for d in docstrings(path.read_text("utf-8"), str(path.relative_to(ROOT))))
    assert not [fault for found in every for fault in faults(found)]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""Tells what is stored."""', 0),
        ('"""Of all rows."""', 1),
        ('"""What is stored"""', 2),
        ('def f() -> bool:\n    """Whether there are rows."""', 0),
        ('class C:\n    """Whether there are rows."""', 1),
    ],
)
def test_the_test_above_can_fail(source: str, count: int) -> None:
    assert sum(len([*faults(found)]) for found in docstrings(source, "a.py")) == count
