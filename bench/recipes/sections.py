"""Takes values out of a TOML file; a fault names file, line, section, key, what was given and what is allowed."""

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

Parse = Callable[[object, str], Any]  # of a value and what it is called in messages; raises InvalidInputError


@dataclass(frozen=True, slots=True)
class Section:
    """A table of a TOML file. name: its heading, without brackets; empty: what stands above all headings."""

    path: Path
    text: str
    name: str
    values: Mapping[str, Any]

    def inner(self, key: str) -> Section:
        """Return the table with this heading, which is empty where there is none. Raises ``InvalidInputError``."""
        found = self.values.get(key, {})
        if not isinstance(found, Mapping):
            self.refuse(key, f"is {shown(found)}; it must be a section, [{self._heading(key)}]")
        return Section(self.path, self.text, self._heading(key), found)

    def take(self, key: str, parse: Parse, default: object = None) -> Any:
        """Return a value as ``parse`` makes it, or the default where there is none. Raises ``InvalidInputError``."""
        return self.parsed(key, self.values[key], parse) if key in self.values else default

    def parsed(self, key: str, value: object, parse: Parse) -> Any:
        """Return what ``parse`` makes of a value. Raises ``InvalidInputError``."""
        try:
            return parse(value, key)
        except InvalidInputError as error:
            text = str(error)
            self.refuse(key, text.removeprefix(f"{key} ").removeprefix(f"{key}: "))

    def require_known(self, allowed: Iterable[str]) -> None:
        """Refuse a key that is not allowed. Raises ``InvalidInputError``."""
        names = list(allowed)
        for key in self.values:
            if key not in names:
                close = get_close_matches(key, names, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                self.refuse(key, f"is not known; {hint}allowed are {', '.join(names)}")

    def refuse(self, key: str, what: str) -> NoReturn:
        """Raise ``InvalidInputError``: the place of a key, and what is wrong with it."""
        section = f"[{self.name}] " if self.name else ""
        raise InvalidInputError(f"{self.place(key)}: {section}{key} {what}")

    def place(self, key: str) -> str:
        """Return file and line of a key; the file alone where the line is not found."""
        line = _line_of(self.text, self.name, key)
        return str(self.path) if line is None else f"{self.path}, line {line}"

    def _heading(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


def read_sections(path: Path) -> Section:
    """Read a TOML file. Raises ``InvalidInputError`` with file and line for what is none."""
    try:
        text = path.read_text(encoding="utf-8")
        return Section(path, text, "", tomllib.loads(text))
    except FileNotFoundError:
        raise InvalidInputError(f"{path} is not there; name the file of a recipe") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{path} is no TOML file: {error}") from None


def one_of(value: object, name: str, allowed: Sequence[str]) -> str:
    """Require one of some texts. Raises ``InvalidInputError``."""
    if value not in allowed:
        raise InvalidInputError(f"{name} is {shown(value)}; allowed are {', '.join(allowed)}")
    return str(value)


def alternatives(value: object, name: str) -> Sequence[object]:
    """Require a list that is not empty. Raises ``InvalidInputError``."""
    if not isinstance(value, list) or not value:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be a list of all that is to be tried")
    return value


def _line_of(text: str, section: str, key: str) -> int | None:
    """Return the line in which a key, or the heading of this name, stands; ``None``: it is written in another way."""
    here, heading = "", f"{section}.{key}" if section else key
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.match(r"\s*\[\[?\s*([^\]]*?)\s*\]", line):
            here = found[1]
            if here == heading:
                return number
        elif here == section and re.match(rf'\s*"?{re.escape(key)}"?\s*=', line):
            return number
    return None
