"""Reads and checks values of a TOML file.

Errors name file, line, section and key, the given value and the allowed values.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from mucudnn.words.errors import InvalidInputError
from mucudnn.words.values import shown

Parse = Callable[[object, str], Any]  # called with a value and its name for messages; raises InvalidInputError


@dataclass(frozen=True, slots=True)
class Section:
    """A table of a TOML file. name: the table's heading without brackets, or empty for the top level."""

    path: Path
    text: str
    name: str
    values: Mapping[str, Any]

    def inner(self, key: str) -> Section:
        """Return the subtable of this name, or an empty section.

        Raises ``InvalidInputError`` if the value is no table.
        """
        found = self.values.get(key, {})
        if not isinstance(found, Mapping):
            self.refuse(key, f"is {shown(found)}; it must be a section, [{self._heading(key)}]")
        return Section(self.path, self.text, self._heading(key), found)

    def take(self, key: str, parse: Parse, default: object = None) -> Any:
        """Return the parsed value of a key, or the default. Raises ``InvalidInputError`` if the value is invalid."""
        return self.parsed(key, self.values[key], parse) if key in self.values else default

    def parsed(self, key: str, value: object, parse: Parse) -> Any:
        """Parse the value of a key with ``parse``. Raises ``InvalidInputError`` if ``parse`` refuses it."""
        try:
            return parse(value, key)
        except InvalidInputError as error:
            text = str(error)
            self.refuse(key, text.removeprefix(f"{key} ").removeprefix(f"{key}: "))

    def require_known(self, allowed: Iterable[str]) -> None:
        """Raise ``InvalidInputError`` if the section has a key that is not among the allowed ones."""
        names = list(allowed)
        for key in self.values:
            if key not in names:
                close = get_close_matches(key, names, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                self.refuse(key, f"is not known; {hint}allowed are {', '.join(names)}")

    def refuse(self, key: str, what: str) -> NoReturn:
        """Raise ``InvalidInputError`` with file and line of a key. what: the fault of its value."""
        section = f"[{self.name}] " if self.name else ""
        raise InvalidInputError(f"{self.place(key)}: {section}{key} {what}")

    def place(self, key: str) -> str:
        """Return file and line of a key as text, or only the file if the line is not found."""
        line = _line_of(self.text, self.name, key)
        return str(self.path) if line is None else f"{self.path}, line {line}"

    def _heading(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


def read_sections(path: Path) -> Section:
    """Read a TOML file as a section.

    Raises ``InvalidInputError`` with file and line if the file is missing or invalid.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return Section(path, text, "", tomllib.loads(text))
    except FileNotFoundError:
        raise InvalidInputError(f"{path} does not exist; name the file of a recipe") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{path} is not a TOML file: {error}") from None


def one_of(value: object, name: str, allowed: Sequence[str]) -> str:
    """Return ``value`` if it is one of the allowed texts. Raises ``InvalidInputError`` for other values."""
    if value not in allowed:
        raise InvalidInputError(f"{name} is {shown(value)}; allowed are {', '.join(allowed)}")
    return str(value)


def alternatives(value: object, name: str) -> Sequence[object]:
    """Return ``value`` if it is a non-empty list. Raises ``InvalidInputError`` for other values."""
    if not isinstance(value, list) or not value:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be a list of alternatives")
    return value


def _line_of(text: str, section: str, key: str) -> int | None:
    """Return the number of the line with a key of a section, or with the key's own heading; None if not found."""
    here, heading = "", f"{section}.{key}" if section else key
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.match(r"\s*\[\[?\s*([^\]]*?)\s*\]", line):
            here = found[1]
            if here == heading:
                return number
        elif here == section and re.match(rf'\s*"?{re.escape(key)}"?\s*=', line):
            return number
    return None
