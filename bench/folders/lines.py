"""Lines of a result folder's files: JSON objects that name their format version and their folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mucudnn.bench.folders.header import FORMAT_VERSION, Header
from mucudnn.words.errors import InvalidInputError


def object_of_line(text: str, header: Header, columns: Iterable[str]) -> dict[str, Any]:
    """Return the object of a line, which has the columns and those of the subject.

    Raises ``InvalidInputError``, saying what is wrong with the line.
    """
    try:
        line = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"half-written, or no JSON: {error.msg}") from None
    except RecursionError:
        raise InvalidInputError("nested too deeply") from None
    if not isinstance(line, dict):
        raise InvalidInputError(f"no JSON object, but {type(line).__name__}")
    if line.get("format_version") != FORMAT_VERSION:
        raise InvalidInputError(f"format version {line.get('format_version')}, and not {FORMAT_VERSION}")
    if line.get("folder") != header.identity:
        raise InvalidInputError(f"a row of another folder, {line.get('folder')}, and not of {header.identity}")
    if missing := [name for name in (*columns, *header.subject_columns) if name not in line]:
        raise InvalidInputError(f"no column {', '.join(missing)}")
    return line


def _refuse_constant(name: str) -> float:
    raise InvalidInputError(f"{name} is no finite number")
