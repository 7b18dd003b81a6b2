"""Conversion of user input to the types that mucudnn uses inside, and text for people: bytes, times.

Also ``grouped``, which collects values by key.

A value of a similar type would pass some comparisons and fail others: text equals the member of a ``StrEnum`` but is
not identical to it, True equals 1, and SQLite stores a NumPy integer as bytes. NumPy's and torch's scalars and arrays
are accepted in place of Python's. Inside mucudnn bytes are ints and seconds floats.

In all functions ``name`` is the name of the value in error messages. All functions with a ``name`` raise
``InvalidInputError``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from decimal import Decimal
from difflib import get_close_matches
from enum import StrEnum
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

from mucudnn.core.errors import InvalidInputError, UnavailableError

_Choice = TypeVar("_Choice", bound=StrEnum)
_Kind = TypeVar("_Kind")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

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
    number = value if type(value) is int else plain(value)
    if type(number) is not int:
        if isinstance(number, bool) or not isinstance(number, Integral):
            _refuse(value, name, "a whole number")
        number = int(number)
    if number < least:
        _refuse(value, name, f"at least {least}")
    if number > most:
        _refuse(value, name, f"at most {most}")
    return number


def sizes(value: object, name: str, dims: int, least: int, most: int) -> tuple[int, ...]:
    """Return one integer for each of ``dims`` dimensions, (height, width) or (depth, height, width), or one for all."""
    converted = value if type(value) is tuple else plain(value)
    numbers: Sequence[object] = converted if isinstance(converted, (tuple, list)) else (converted,) * dims
    with suppress(ValueError):
        if len(numbers) == dims:
            return tuple(whole(number, name, least, most) for number in numbers)
    allowed = (
        "one or two whole numbers (height, width); both"
        if dims == 2
        else ("one or three whole numbers (depth, height, width); all")
    )
    return _refuse(value, name, f"{allowed} must be at least {least}, at most {most}")


def real(value: object, name: str) -> float:
    """Return a finite number as a ``float``; reject anything else, including bools."""
    converted, number = plain(value), inf
    if isinstance(converted, Real) and not isinstance(converted, bool):
        with suppress(OverflowError):
            number = float(converted)
    return number if isfinite(number) else _refuse(value, name, "a finite number")


def flag(value: object, name: str) -> bool:
    """Return True or False; reject other values, since every non-empty text would count as true."""
    converted = plain(value)
    return converted if isinstance(converted, bool) else _refuse(value, name, "True or False")


def text(value: object, name: str) -> str:
    return str(value) if isinstance(value, str) else _refuse(value, name, "text")


def several(value: object) -> Iterable[object]:
    """Return the elements of an iterable; treat text or any other value as a single element."""
    converted = plain(value)
    return converted if isinstance(converted, Iterable) and not isinstance(converted, str) else (converted,)


def texts(value: object, name: str) -> tuple[str, ...]:
    """Require one or several texts; return each text once, in order. A single text is one element, not its letters."""
    return tuple(dict.fromkeys(text(element, f"one of {name}") for element in several(value)))


def member(kind: type[_Choice], value: object, name: str) -> _Choice:
    """Return the member of the enum ``kind`` for a member or its text, with hyphens or underscores."""
    if type(value) is kind:
        return value
    if isinstance(value, str):
        for choice in kind:
            if value.replace("_", "-") == choice.replace("_", "-"):
                return choice
    raise InvalidInputError(f"{name} is {shown(value)}; allowed are {', '.join(kind)}")


def instance(kind: type[_Kind], value: object, name: str) -> _Kind:
    """Return the value, unconverted, if it is an instance of the class ``kind``; reject any other value."""
    return value if isinstance(value, kind) else _refuse(value, name, f"a {kind.__name__}")


def _refuse(value: object, name: str, allowed: str) -> NoReturn:
    raise InvalidInputError(f"{name} is {shown(value)}; it must be {allowed}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question that suggests the closest of ``names``, or an empty string if none is close."""
    close = get_close_matches(name, [*names], n=1)
    return f"did you mean {close[0]}? " if close else ""


NUMBER = r"[0-9]{1,999}(?:\.[0-9]{1,999})?"  # \d matches digits of all scripts
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE_HELP = "write a number and a unit, for example 64MiB (B, KiB, MiB, GiB, TiB)"
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME_HELP = "write for example 60s, 2min or 500ms"


def parse_bytes(text: str | int | None) -> int | None:
    """Parse a size; an int is a number of bytes, None and ``"none"`` mean no limit.

    Raises ``InvalidInputError`` for anything else, and above 2**63 - 1 bytes. Decimal units (MB) are rejected, since
    they may mean powers of 1000 or 1024, and so is text other than 0 without a unit, which may mean bytes or MiB.

    >>> parse_bytes("64MiB"), parse_bytes("1.5 KiB"), parse_bytes(1000), parse_bytes("0"), parse_bytes("none")
    (67108864, 1536, 1000, 0, None)
    """
    if text is None or _is_none(text):
        return None
    if not isinstance(text, str):
        return whole(text, "the number of bytes")
    match = re.fullmatch(rf"\s*({NUMBER})\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise InvalidInputError(f"size {shown(text)} is not understood; {_SIZE_HELP}")
    number, unit = match.groups()
    if not unit and Decimal(number):
        raise InvalidInputError(f"size {shown(text)} has no unit; {_SIZE_HELP}")
    factors = {name.lower(): factor for name, factor in (_UNITS | _DECIMAL_UNITS).items()} | {"": 1}
    if unit.lower() not in factors:
        raise InvalidInputError(f"size {shown(text)} has the unknown unit {shown(unit)}; {_SIZE_HELP}")
    size = Decimal(number) * factors[unit.lower()]  # floats would round sizes written by ``exact_bytes``
    if size > LARGEST:
        raise InvalidInputError(f"size {shown(text)} is more than {LARGEST} bytes; write a smaller one")
    if unit.upper() in _DECIMAL_UNITS:
        likely = f"{number}{unit[0].upper()}iB"
        raise InvalidInputError(
            f"size {shown(text)} is ambiguous: write {likely} (powers of 1024) or {int(size)}B (exactly)"
        )
    return int(size)


def _is_none(text: object) -> bool:
    return isinstance(text, str) and text.strip().lower() == "none"


def format_bytes(value: int | None) -> str:
    """Format a number of bytes for people, rounded.

    >>> format_bytes(67108864), format_bytes(1_000_000), format_bytes(None)
    ('64 MiB', '977 KiB', 'no limit')
    """
    if value is None:
        return "no limit"
    unit = next((unit for unit in ("B", "KiB", "MiB") if value < 1024 * _UNITS[unit]), "GiB")
    return f"{value / _UNITS[unit]:.3g} {unit}" if value < 1000 * _UNITS[unit] else f"{value // _UNITS[unit]} {unit}"


def exact_bytes(value: int) -> str:
    """Format a number of bytes exactly, since a rounded limit may be too small, and rounded in parentheses.

    >>> exact_bytes(67108864)
    '67108864B (64 MiB)'
    """
    return f"{value}B ({format_bytes(value)})"


def parse_seconds(text: str | float | None) -> float | None:
    """Parse a time; a number is in seconds, None and ``"none"`` mean no limit.

    Raises ``InvalidInputError`` for anything else, and for times that are negative or not finite.

    >>> parse_seconds("2min"), parse_seconds("500ms"), parse_seconds("60"), parse_seconds(0.1)
    (120.0, 0.5, 60.0, 0.1)
    """
    if text is None or _is_none(text):
        return None
    if isinstance(text, str):
        match = re.fullmatch(rf"\s*({NUMBER}(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text)
        if match is None or match.group(2) not in _SECONDS:
            raise InvalidInputError(f"time {shown(text)} is not understood; {_TIME_HELP}")
        seconds = float(match.group(1)) * _SECONDS[match.group(2)]
    else:
        seconds = real(text, "the time in seconds")
    if not 0 <= seconds < inf:
        raise InvalidInputError(f"time {shown(text)} is negative or too long; {_TIME_HELP}")
    return seconds


def parse_time_limit(text: str | float | None) -> float | None:
    """Parse a time as ``parse_seconds`` does, but raise ``InvalidInputError`` for 0 too.

    >>> parse_time_limit("2min"), parse_time_limit("none")
    (120.0, None)
    """
    seconds = parse_seconds(text)
    if seconds == 0:
        raise InvalidInputError(f"time {shown(text)} is 0; it must be above 0: {_TIME_HELP}")
    return seconds


def format_seconds(value: float) -> str:
    """Format a time for people.

    >>> format_seconds(0.0123), format_seconds(2.5e-5), format_seconds(3)
    ('12.3 ms', '25 us', '3 s')
    """
    if value < 1e-3:
        return f"{value * 1e6:.3g} us"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key, in the order of the pairs.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def require_device_type(device: str) -> None:
    """Raise ``UnavailableError`` for a device other than ``"cpu"`` and ``"cuda"``."""
    if device not in ("cpu", "cuda"):
        raise UnavailableError(
            f"device is {device!r}; mucudnn measures on 'cpu' and 'cuda': use device='cpu', or 'cuda' for the current "
            "GPU (CUDA_VISIBLE_DEVICES=1 picks another)"
        )
