"""Numbers of ranks, as commands read them."""

from __future__ import annotations

import re
from itertools import pairwise

from mucudnn.cli.shared.options import SIZE
from mucudnn.words.errors import InvalidInputError


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read numbers of ranks, ascending; dots between two go on with the factor of the two before them.

    Raises ``InvalidInputError``.

    >>> parse_ranks("1,2,4,...,64"), parse_ranks("3, 5")
    ((1, 2, 4, 8, 16, 32, 64), (3, 5))
    """
    ranks: list[int] = []
    parts = [part.strip() for part in text.split(",")]
    for number, part in enumerate(parts):
        if part == "..." and len(ranks) >= 2 and number + 2 == len(parts):
            ranks += _going_on(ranks[-2], ranks[-1], _count_of_ranks(parts[-1], text))
        else:
            ranks.append(_count_of_ranks(part, text))
    if any(more <= fewer for fewer, more in pairwise(ranks)):
        raise InvalidInputError(f"the ranks {text!r} do not ascend; write them as 1,2,4,...,4096")
    return tuple(ranks)


def _count_of_ranks(part: str, text: str) -> int:
    if re.fullmatch(SIZE, part) is None:
        raise InvalidInputError(f"{part!r} in {text!r} is no number of ranks; write for example 1,2,4,...,4096")
    return int(part)


def _going_on(before: int, last: int, end: int) -> list[int]:
    """Return what is between the last of the numbers and the end, each as many times the one before as that is."""
    factor, left = divmod(last, before)
    found = list[int]()
    while not left and factor > 1 and last * factor < end:
        last *= factor
        found.append(last)
    if left or factor < 2 or last * factor != end:
        raise InvalidInputError(f"the ranks do not go on from {before},{last} to {end}; write all of them")
    return found
