"""Reads recipes: TOML files with a command, the values of options that vary, and criteria for the results.

The three parts are those of Deep500 (Ben-Nun et al., 2019): fixed, mutable and acceptable.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from mucudnn.bench.suites.recipes.criteria import Criterion
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import did_you_mean, shown

_SUFFIX = ".toml"
_PARTS = ("fixed", "mutable", "acceptable")
_DEVICES = ("cpu", "cuda")
_KEYS = ("title", "takes", "published", *_PARTS, *_DEVICES)
_Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """An experiment as it applies to one type of device. command: without ``mucudnn``, such as ``bench training``.

    takes: roughly how long it takes on two CPU cores. published: published results. runs: the options and arguments of
    each run of the command, by the name of its result folder.
    """

    title: str
    takes: str
    published: tuple[str, ...]
    command: str
    runs: Mapping[str, Mapping[str, Any]]
    criteria: tuple[Criterion, ...]


def shipped_recipes() -> dict[str, Path]:
    """Return the TOML files of the recipes that come with mucudnn, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "shipped").glob(f"*{_SUFFIX}"))}


def find_recipe(name_or_file: str) -> Path:
    """Return the path of a recipe, given as a file that ends in .toml, or as the name of one of mucudnn's recipes.

    Raises ``InvalidInputError`` for an unknown name.
    """
    every = shipped_recipes()
    if name_or_file.endswith(_SUFFIX):
        return Path(name_or_file)
    if name_or_file not in every:
        raise InvalidInputError(
            f"recipe is {name_or_file!r}; {did_you_mean(name_or_file, every)}name a file that ends in {_SUFFIX}, or "
            f"one of {', '.join(every)}"
        )
    return every[name_or_file]


def read_recipe(path: Path, device: str = "cpu") -> Recipe:
    """Read a recipe for a type of device, whose own sections, such as ``[cpu.fixed]``, take precedence key by key.

    Raises ``InvalidInputError`` with the file, the section and the key.
    """
    try:
        top = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"{path} does not exist; name the file of a recipe") from None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} is not a TOML file: {error}") from None
    try:
        _require_known("", top, _KEYS)
        for one in _DEVICES:
            _require_known(f"[{one}] ", _section(top, one), _PARTS)
        fixed, mutable, acceptable = (
            {**_section(top, part), **_section(_section(top, device), part)} for part in _PARTS
        )
        command = fixed.pop("command", None)
        if not isinstance(command, str):
            raise InvalidInputError('[fixed] needs a command, such as command = "bench convolutions"')
        criteria = tuple(Criterion.read(name, value) for name, value in acceptable.items())
        if not criteria:
            raise InvalidInputError("[acceptable] has no criterion")
        published = tuple(map(str, top.get("published", ())))
        title, takes = str(top.get("title", path.stem)), str(top.get("takes", ""))
        return Recipe(title, takes, published, command, _runs(fixed, mutable), criteria)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None


def _section(outer: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = outer.get(name, {})
    if not isinstance(found, dict):
        raise InvalidInputError(f"{name} is {shown(found)}; it must be a section, [{name}]")
    return found


def _require_known(section: str, found: Iterable[str], allowed: tuple[str, ...]) -> None:
    for key in found:
        if key not in allowed:
            hint = f"{did_you_mean(key, allowed)}allowed: {', '.join(allowed)}"
            raise InvalidInputError(f"{section}{key} is not known; {hint}")


def _runs(fixed: _Options, mutable: _Options) -> dict[str, _Options]:
    """Return the options of each run: one for each combination of the values that [mutable] lists.

    A text with commas is one value, for options that take several: the command then measures them in turns.
    """
    for key, value in fixed.items():
        if isinstance(value, (list, dict)) or key in mutable:
            raise InvalidInputError(f"[fixed] {key} is {shown(value)}; it must be one value, and not in [mutable], too")
    axes = {key: value if isinstance(value, list) else [value] for key, value in mutable.items()}
    several = [key for key, values in axes.items() if len(values) > 1]
    runs = {}
    for chosen in product(*axes.values()):
        options = {**fixed, **dict(zip(axes, chosen, strict=True))}
        name = "-".join(re.sub(r"[^\w.]+", "-", str(options[key])).strip("-.") for key in several)
        runs[name or "results"] = options
    return runs
