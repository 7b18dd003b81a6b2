"""Finds out whether ranks chose alike: digests first, then what differs, in words. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

from mucudnn.distributed.fingerprint import by_rank
from mucudnn.words.errors import SharingError

Described = Mapping[str, Mapping[str, str]]  # convolution -> what was decided, by name

_MOST_SHOWN = 5


def digest(choices: Described) -> str:
    """Return what is equal for equal choices, and for others in all likelihood is not.

    >>> digest({"conv1": {"configuration": "gemm 8"}}) == digest({"conv1": {"configuration": "gemm 4×2"}})
    False
    """
    return sha256(repr([(name, [*of.items()]) for name, of in choices.items()]).encode()).hexdigest()


def require_agreement(choices: Mapping[int, Described]) -> None:
    """Raise ``SharingError`` that names convolutions, ranks and what differs, if not all ranks chose alike.

    Of each convolution the first thing that differs is named.
    """
    names = dict.fromkeys(name for described in choices.values() for name in described)
    own = {name: {rank: described.get(name, {}) for rank, described in choices.items()} for name in names}
    if found := [f"{name}: {what}" for name, of in own.items() if (what := _difference(of)) is not None]:
        raise SharingError(f"the ranks chose differently: {_some(found)}; please report this")


def _difference(described: Mapping[int, Mapping[str, str]]) -> str | None:
    for what in dict.fromkeys(what for of in described.values() for what in of):
        values = {rank: of.get(what, "nothing") for rank, of in described.items()}
        if len({*values.values()}) > 1:
            return f"{what} is {by_rank(values)}"
    return None


def _some(found: Sequence[str]) -> str:
    more = len(found) - _MOST_SHOWN
    return "; ".join(found[:_MOST_SHOWN]) + (f"; and {more} more" if more > 0 else "")
