"""Parse and format bytes, seconds and bandwidths; inside mucudnn these are int bytes and float seconds."""

from __future__ import annotations

import re
from decimal import Decimal
from math import inf

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import LARGEST, real, shown, whole

_NUMBER = r"[0-9]{1,999}(?:\.[0-9]{1,999})?"  # \d matches digits of all scripts
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE_HELP = "write a number and a unit, for example 64MiB (B, KiB, MiB, GiB, TiB), or none for no limit"
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BANDWIDTHS = {
    **{name.lower(): float(factor) for name, factor in (_UNITS | _DECIMAL_UNITS).items()},
    **{f"{prefix}bit": 10.0**exponent / 8 for prefix, exponent in (("k", 3), ("m", 6), ("g", 9), ("t", 12))},
}
_TIME_HELP = "write for example 60s, 2min or 500ms, or none for no limit"


def parse_bytes(text: str | int | None) -> int | None:
    """Parse a size; an int is a number of bytes, None and ``"none"`` mean no limit.

    Raises ``InvalidInputError`` for anything else, and above 2**63 - 1 bytes. Decimal units (MB) are rejected, since
    they may mean powers of 1000 or 1024, and so is text without a unit, which may mean bytes or MiB.

    >>> parse_bytes("64MiB"), parse_bytes("1.5 KiB"), parse_bytes(1000), parse_bytes("none")
    (67108864, 1536, 1000, None)
    """
    if text is None or _is_none(text):
        return None
    if not isinstance(text, str):
        return whole(text, "the number of bytes")
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise InvalidInputError(f"size {shown(text)} is not understood; {_SIZE_HELP}")
    number, unit = match.groups()
    by_lower = {name.lower(): factor for name, factor in _UNITS.items()}
    if unit.lower() in by_lower:
        return _product(text, number, by_lower[unit.lower()])
    if not unit:
        raise InvalidInputError(f"size {shown(text)} has no unit; {_SIZE_HELP}")
    if unit.upper() in _DECIMAL_UNITS:
        exact = f"{_product(text, number, _DECIMAL_UNITS[unit.upper()])}B"
        likely = f"{number}{unit[0].upper()}iB"
        raise InvalidInputError(
            f"size {shown(text)} is ambiguous: write {likely} (powers of 1024) or {exact} (exactly)"
        )
    raise InvalidInputError(f"size {shown(text)} has the unknown unit {shown(unit)}; {_SIZE_HELP}")


def _product(text: str, number: str, factor: int) -> int:
    """Multiply a decimal number by a unit exactly, since floats would round sizes written by ``exact_bytes``."""
    size = Decimal(number) * factor
    if size > LARGEST:
        raise InvalidInputError(f"size {shown(text)} is more than {LARGEST} bytes; write a smaller one, or none")
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
    for unit in ("B", "KiB", "MiB"):
        if value < 1024 * _UNITS[unit]:
            break
    else:
        unit = "GiB"
    return f"{value / _UNITS[unit]:.3g} {unit}" if value < 1000 * _UNITS[unit] else f"{value // _UNITS[unit]} {unit}"


def exact_bytes(value: int) -> str:
    """Format a number of bytes exactly, since a rounded limit may be too small, and rounded in parentheses.

    >>> exact_bytes(67108864)
    '67108864B (64 MiB)'
    """
    return f"{value}B ({format_bytes(value)})"


def parse_bandwidth(text: str) -> float:
    """Parse a bandwidth in decimal units (GB/s), powers of 1024 (GiB/s) or bits (Gbit/s); return bytes per second.

    Raises ``InvalidInputError`` for anything else, and for 0.

    >>> parse_bandwidth("25GB/s"), parse_bandwidth("100 Gbit/s"), parse_bandwidth("1GiB/s")
    (25000000000.0, 12500000000.0, 1073741824.0)
    """
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]+)/s\s*", text)
    factor = None if match is None else _BANDWIDTHS.get(match.group(2).lower())
    if match is None or factor is None or not 0 < float(match.group(1)) * factor < inf:
        raise InvalidInputError(f"bandwidth {shown(text)} is not understood; write for example 25GB/s or 100Gbit/s")
    return float(match.group(1)) * factor


def parse_seconds(text: str | float | None) -> float | None:
    """Parse a time; a number is in seconds, None and ``"none"`` mean no limit.

    Raises ``InvalidInputError`` for anything else, and for times that are negative or not finite.

    >>> parse_seconds("2min"), parse_seconds("500ms"), parse_seconds("60"), parse_seconds(0.1)
    (120.0, 0.5, 60.0, 0.1)
    """
    if text is None or _is_none(text):
        return None
    seconds = _seconds(text) if isinstance(text, str) else real(text, "the time in seconds")
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


def _seconds(text: str) -> float:
    match = re.fullmatch(rf"\s*({_NUMBER}(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text)
    if match is None or match.group(2) not in _SECONDS:
        raise InvalidInputError(f"time {shown(text)} is not understood; {_TIME_HELP}")
    return float(match.group(1)) * _SECONDS[match.group(2)]


def format_seconds(value: float) -> str:
    """Format a time for people.

    >>> format_seconds(0.0123), format_seconds(2.5e-5), format_seconds(3)
    ('12.3 ms', '25 us', '3 s')
    """
    if value < 1e-3:
        return f"{value * 1e6:.3g} us"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
