"""Finds the recipes that come with mucudnn by their names, and others by their files. Loads no torch."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from mucudnn.words.errors import InvalidInputError

SUFFIX = ".toml"
_FOLDER = Path(__file__).parent / "shipped"


def shipped_recipes() -> dict[str, Path]:
    """Return the file of each recipe that comes with mucudnn, by its name."""
    return {path.stem: path for path in sorted(_FOLDER.glob(f"*{SUFFIX}"))}


def find_recipe(name_or_file: str) -> Path:
    """Return the file of a recipe: a file's own name ends in .toml, any other text is the name of a shipped one.

    Raises ``InvalidInputError`` where there is none.
    """
    if name_or_file.endswith(SUFFIX):
        return Path(name_or_file)
    every = shipped_recipes()
    if name_or_file not in every:
        close = get_close_matches(name_or_file, every, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InvalidInputError(
            f"recipe is {name_or_file!r}; {hint}name a file that ends in {SUFFIX}, or one of {', '.join(every)}"
        )
    return every[name_or_file]
