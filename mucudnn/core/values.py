"""Conversion of user input to the types that mucudnn uses inside, with errors that explain what is allowed.

A value of a similar type would pass some comparisons and fail others: text equals the member of a ``StrEnum`` but is
not identical to it, True equals 1, and SQLite stores a NumPy integer as bytes. NumPy's and torch's scalars and arrays
are accepted in place of Python's.

In all functions ``name`` is the name of the value in error messages. All functions with a ``name`` raise
``InvalidInputError``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from enum import StrEnum
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

from mucudnn.core.errors import InvalidInputError

_Choice = TypeVar("_Choice", bound=StrEnum)
_Kind = TypeVar("_Kind")

LARGEST = 2**63 - 1  # largest integer that SQLite and C++ can hold
_MOST_SHOWN = 80  # characters


def settle(record: object, **values: object) -> None:
    """Set fields of a frozen dataclass to checked values; call this function only in ``__post_init__``."""
    for name, value in values.items():
        if getattr(record, name) is not value:  # cheaper than setting it
            object.__setattr__(record, name, value)


def shown(value: object) -> str:
    """Return a short ``repr`` on one line, even of an int with thousands of digits, for which ``repr`` raises."""
    try:
        text = repr(value).replace("\n", " ")
    except ValueError:
        return f"a too long {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def plain(value: object) -> Any:
    """Convert a value of NumPy or torch to the equal Python value, without importing NumPy or torch."""
    convert = None if isinstance(value, type) else getattr(value, "tolist", None)
    try:
        return value if convert is None else convert()
    except (RuntimeError, TypeError):  # a meta or sparse tensor
        return value


def whole(value: object, name: str, least: int = 0, most: int = LARGEST) -> int:
    """Return an integer from ``least`` to ``most`` as an ``int``; reject anything else, including bools and floats."""
    number = value if type(value) is int else _python_int(value, name)
    if number < least:
        _refuse(value, name, f"at least {least}")
    if number > most:
        _refuse(value, name, f"at most {most}")
    return number


def pair(value: object, name: str, least: int, most: int) -> tuple[int, int]:
    """Return (height, width) from two integers, or from one integer for both."""
    given = value if type(value) is tuple else plain(value)
    both: Sequence[object] = given if isinstance(given, (tuple, list)) else (given, given)
    try:
        height, width = (whole(number, name, least, most) for number in both)
    except ValueError:
        _refuse(value, name, f"one or two whole numbers (height, width); both must be at least {least}, at most {most}")
    return height, width


def real(value: object, name: str) -> float:
    """Return a finite number as a ``float``; reject anything else, including bools."""
    given, number = plain(value), inf
    if isinstance(given, Real) and not isinstance(given, bool):
        with suppress(OverflowError):
            number = float(given)
    return number if isfinite(number) else _refuse(value, name, "a finite number")


def flag(value: object, name: str) -> bool:
    """Return True or False; reject other values, since every non-empty text would count as true."""
    given = plain(value)
    return given if isinstance(given, bool) else _refuse(value, name, "True or False")


def text(value: object, name: str) -> str:
    return str(value) if isinstance(value, str) else _refuse(value, name, "text")


def several(value: object) -> Iterable[object]:
    """Return the elements of an iterable; treat text or any other value as a single element."""
    given = plain(value)
    return given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def texts(value: object, name: str) -> tuple[str, ...]:
    """Require one or several texts; return each text once, in order. A single text is one element, not its letters."""
    return tuple(dict.fromkeys(text(one, f"one of {name}") for one in several(value)))


def member(kind: type[_Choice], value: object, name: str) -> _Choice:
    """Return the member of the enum ``kind`` for a member or its text, with hyphens or underscores."""
    if type(value) is kind:
        return value
    if isinstance(value, str):
        for one in kind:
            if value.replace("_", "-") == one.replace("_", "-"):
                return one
    raise InvalidInputError(f"{name} is {shown(value)}; allowed are {', '.join(kind)}")


def instance(kind: type[_Kind], value: object, name: str) -> _Kind:
    """Return the value, unconverted, if it is an instance of the class ``kind``; reject any other value."""
    return value if isinstance(value, kind) else _refuse(value, name, f"a {kind.__name__}")


def _python_int(value: object, name: str) -> int:
    given = plain(value)
    if isinstance(given, bool) or not isinstance(given, Integral):
        _refuse(value, name, "a whole number")
    return int(given)


def _refuse(value: object, name: str, allowed: str) -> NoReturn:
    raise InvalidInputError(f"{name} is {shown(value)}; it must be {allowed}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question that suggests the closest of ``names``, or an empty string if none is close."""
    close = get_close_matches(name, [*names], n=1)
    return f"did you mean {close[0]}? " if close else ""
