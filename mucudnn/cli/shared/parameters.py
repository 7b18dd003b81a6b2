"""Types of command-line parameters, paths among them, and the functions that parse their texts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import click

from mucudnn.core.config import or_word
from mucudnn.core.errors import InvalidInputError, MucudnnError
from mucudnn.core.files import beside
from mucudnn.core.values import member, parse_bytes, require_device_type, whole

LARGEST = 2**31 - 1  # largest int of C libraries
MOST_SOLVED = 65536  # largest batch size: all sizes up to it are solved
SIZE = "[1-9][0-9]{0,8}"  # a regular expression: from 1, and within LARGEST
MOST_THREADS = 1024  # with many more, OpenMP runs out of memory and aborts


class Text(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """Parameter type whose values a function parses from text; ``shown`` is the placeholder in --help.

    A ``MucudnnError`` of the function becomes a usage error naming the option. Defaults are not parsed.
    """

    def __init__(self, shown: str, parse: Callable[[str], object]) -> None:
        self.name = shown
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value) if isinstance(value, str) and not isinstance(value, StrEnum) else value
        except MucudnnError as error:
            return self.fail(str(error), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.name


class OpenFlag(click.types.BoolParamType):
    """Parameter type of a flag with a third value, None, for which variables of the environment say ``auto``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if str(value).strip().lower() == "auto" else super().convert(value, param, ctx)


def count(least: int = 1, most: int = LARGEST) -> Text:
    """Return the parameter type of a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        is_number = re.fullmatch("[+-]?[0-9]{1,99}", text)
        return whole(int(text) if is_number else text, "the number", least, most)

    return Text("INTEGER", parse)


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(SIZE, part) for part in parts):
        raise InvalidInputError(
            f"{text!r} is not a list of whole numbers, each from 1 to 999999999; write for example 1,8,32"
        )
    return tuple(map(int, parts))


COUNTS = Text("N,...", _counts)


def one_each(sizes: tuple[int, ...], sources: Sequence[str]) -> tuple[int, ...]:
    """Return a batch size for each source, given one for all or one for each. Raises ``UsageError`` for other numbers.

    >>> one_each((8,), ["alexnet", "vgg16"])
    (8, 8)
    """
    if len(sizes) not in (1, len(sources)):
        raise click.UsageError(
            f"--batch has {len(sizes)} sizes for {len(sources)} sources: give one for all, or one for each"
        )
    return sizes * len(sources) if len(sizes) == 1 else sizes


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse ascending numbers of ranks (processes); ``...`` continues with the ratio of the two preceding numbers.

    Raises ``InvalidInputError`` for other text.

    >>> parse_ranks("1,2,4,...,64"), parse_ranks("3, 5")
    ((1, 2, 4, 8, 16, 32, 64), (3, 5))
    """
    beginning, dots, last = text.replace(" ", "").partition(",...,")
    ranks = [*_counts(beginning)]
    if dots:
        end = _counts(last)[-1] if "," not in last else 0
        factor = ranks[-1] // ranks[-2] if len(ranks) > 1 else 1
        while 1 < factor <= end // ranks[-1]:
            ranks.append(ranks[-1] * factor)
        if ranks[-1] != end:
            raise InvalidInputError(f"the ranks {text!r} do not go on to {end}; write all of them")
    if ranks != sorted(set(ranks)):
        raise InvalidInputError(f"the ranks {text!r} do not ascend; write them as 1,2,4,...,4096")
    return tuple(ranks)


def parse_filters(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse filter sizes: ``3x3,3x5x5`` as ((3, 3), (3, 5, 5)), ``all`` as ().

    Raises ``InvalidInputError`` for other text.
    """
    parts = [] if text == "all" else [part.strip() for part in text.split(",")]
    if wrong := [part for part in parts if re.fullmatch(rf"{SIZE}(x{SIZE}){{1,2}}", part) is None]:
        raise InvalidInputError(f"{wrong[0]!r} is not the size of a filter; write for example 3x3,3x5x5, or all")
    return tuple(tuple(map(int, part.split("x"))) for part in parts)


def choice(kind: type[StrEnum]) -> Text:
    """Return the parameter type whose value is one member of an enumeration, written with hyphens or underscores."""
    spellings = "|".join(kind).replace("_", "-")
    return Text(f"[{spellings}]", lambda text: member(kind, text, "the value"))


def several(kind: type[StrEnum]) -> Text:
    """Return the parameter type whose value is a tuple of members of an enumeration, in the enumeration's order.

    The user writes the members separated by commas.
    """

    def parse(text: str) -> tuple[StrEnum, ...]:
        chosen = {member(kind, part.strip(), "one of the values") for part in text.split(",")}
        return tuple(choice for choice in kind if choice in chosen)

    return Text(",".join(kind).replace("_", "-"), parse)


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse channels, depth if any, height and width of one sample, or channels and length of a sequence.

    Raises ``InvalidInputError`` for other text.

    >>> parse_shape("3x224x224")
    (3, 224, 224)
    """
    if re.fullmatch(rf"{SIZE}(x{SIZE}){{1,3}}", text) is None:
        raise InvalidInputError(
            f"{text!r} is not channels x height x width of one sample, channels x depth x height x width, or channels "
            "x length; write for example 3x224x224, 3x16x112x112 or 1x8000"
        )
    return tuple(map(int, text.split("x")))


def listed(parse: Callable[[str], object]) -> Callable[[str], tuple[Any, ...]]:
    """Return a function that parses the distinct values of a text with commas, each by ``parse``.

    >>> listed(int)("2, 1,2")
    (2, 1)
    """
    return lambda text: tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def sizes(word: str) -> Text:
    """Return the parameter type of distinct sizes, or of no bound, for which ``word`` and ``none`` stand."""
    size = or_word(lambda part, _: parse_bytes(part), word, "none")
    return Text("SIZE,...", listed(lambda part: size(part, "size")))


def parse_device(text: str) -> str:
    """Return the name of a device, which this machine may lack. Raises ``UnavailableError`` for other text.

    >>> parse_device("cuda:1")
    'cuda:1'
    """
    if re.fullmatch(r"cuda:[0-9]{1,4}", text) is None:
        require_device_type(text)
    return text


class GivenPath(click.Path):
    """Parameter type of a path that is not empty.

    name: placeholder in --help.
    empty: what is said of an empty one.
    """

    def __init__(
        self,
        name: str,
        empty: str = "'' is empty; name a file",
        *,
        path_type: type = Path,
        dir_okay: bool = True,
        file_okay: bool = True,
        allow_dash: bool = False,
    ) -> None:
        super().__init__(path_type=path_type, dir_okay=dir_okay, file_okay=file_okay, allow_dash=allow_dash)
        self.name, self.empty = name, empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) if os.fspath(value) else self.fail(self.empty, param, ctx)


class InputPath(GivenPath):
    """Parameter type of an input; pipes and devices are rejected, since it may be read more than once.

    ``~`` is the home folder. It need not exist: the code that reads it reports what is missing.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        converted = super().convert(os.path.expanduser(value), param, ctx)  # noqa: PTH111  # text for click
        path = Path(converted)
        if path.exists() and not path.is_file() and not path.is_dir():
            self.fail(f"{path} is not a regular file; name a file that can be read more than once", param, ctx)
        return converted


FOLDER = GivenPath("DIR", "'' is empty; name a folder", file_okay=False)
"""Parameter type of a folder of results. It need not exist: the code that reads it reports a missing folder."""

INPUT_FILE = InputPath("file", dir_okay=False)
NAMED_OR_FILE = InputPath("path", path_type=str)
"""Parameter type of a built-in name or a file."""

SOURCE = InputPath(
    "path",
    "'' is not a source; name a network, a table, a CSV file, package.module:factory or file.py:factory",
    path_type=str,
)


class OutputFile(GivenPath):
    """Parameter type of an output file that is replaced as a whole; ``-`` is standard output.

    suffixes: those that are allowed; any if there are none.
    second: word in the name of a second file that is written beside the first.
    """

    def __init__(self, *suffixes: str, second: str = "") -> None:
        super().__init__("file", allow_dash=True)
        self.suffixes, self.second = suffixes, second

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if self.suffixes and not str(path).lower().endswith(self.suffixes):
            kinds = " or ".join(suffix.lstrip(".").upper() for suffix in self.suffixes)
            self.fail(
                f"{str(path)!r} is not a {kinds} file; name one that ends in {' or '.join(self.suffixes)}", param, ctx
            )
        return path

    def files(self, path: Path) -> list[Path]:
        """Return all files that are written for this output path."""
        return [path, beside(path, self.second)] if self.second else [path]
