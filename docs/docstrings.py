"""Docstrings are plain text; here their fields ("batch_size: ...") become lists, and their examples become code."""

from __future__ import annotations

import re

import griffe

_FIELD = re.compile(r"^(\w+): ", re.MULTILINE)
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """Turns every docstring into the Markdown that it means."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _markdown(obj.docstring.value, _names(obj))


def _names(obj: griffe.Object) -> frozenset[str]:
    """Names that a line of the docstring can explain."""
    parameters = [parameter.name for parameter in obj.parameters] if isinstance(obj, griffe.Function) else []
    return frozenset((*parameters, *obj.members))


def _markdown(text: str, names: frozenset[str]) -> str:
    def item(field: re.Match[str]) -> str:
        return f"\n- `{field[1]}`: " if field[1] in names else field[0]

    return _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", _FIELD.sub(item, text))
