"""Comparison of ranks that tune together: settings before tuning. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from mucudnn.core.errors import SharingError
from mucudnn.core.values import shown

_MOST_SHOWN = 3  # different values of one setting, or convolutions
_LONGEST = 120  # characters of a value in an error


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Description of a rank, sent as plain text so that other versions of mucudnn can read it.

    kind: kind of the rank's device; ranks of one kind share measurements. place: the rank's host and database file.
    everywhere: settings that must be equal on all ranks, by name. in_kind: settings that must be equal on ranks of one
    kind. convolutions: the convolutions to tune, also equal on ranks of one kind.
    """

    kind: str = ""
    place: str = ""
    everywhere: Mapping[str, str] = field(default_factory=dict)
    in_kind: Mapping[str, str] = field(default_factory=dict)
    convolutions: tuple[str, ...] = ()

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Make a fingerprint from the plain fields that a rank has sent: the inverse of ``asdict``.

        Fields that another version of mucudnn does not send get defaults, and unknown fields are ignored.
        """
        return cls(**{one.name: plain[one.name] for one in fields(cls) if one.name in plain})


def kinds(fingerprints: Sequence[Fingerprint]) -> dict[str, list[int]]:
    """Return the rank numbers by kind of device, ascending for each kind."""
    found: dict[str, list[int]] = {}
    for rank, fingerprint in enumerate(fingerprints):
        found.setdefault(fingerprint.kind, []).append(rank)
    return found


def differences(fingerprints: Sequence[Fingerprint]) -> list[str]:
    """Return descriptions of the settings that wrongly differ between ranks, with the ranks of each value."""
    every = dict(enumerate(fingerprints))
    found = _differing(every, lambda fingerprint: fingerprint.everywhere)
    for ranks in kinds(fingerprints).values():
        of_kind = {rank: fingerprints[rank] for rank in ranks}
        different = _differing(of_kind, lambda fingerprint: fingerprint.in_kind)
        found += different or _other_convolutions(of_kind)
    return found


def require_alike(fingerprints: Sequence[Fingerprint], remedy: str) -> None:
    """Raise ``SharingError`` with all differences between the ranks and a remedy, if there are differences."""
    if found := differences(fingerprints):
        raise SharingError(f"ranks that tune together must be alike: {'; '.join(found)}. Start them alike; {remedy}")


def _differing(fingerprints: Mapping[int, Fingerprint], part: Callable[[Fingerprint], Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for fingerprint in fingerprints.values() for name in part(fingerprint))
    values = {name: {rank: part(one).get(name, "unknown") for rank, one in fingerprints.items()} for name in names}
    return [f"{name} is {by_rank(of)}" for name, of in values.items() if len({*of.values()}) > 1]


def _other_convolutions(fingerprints: Mapping[int, Fingerprint]) -> list[str]:
    """Compare each rank's convolutions with the first rank's; list some that only one of the two tunes."""
    (first, own), *others = fingerprints.items()
    for rank, other in others:
        here, there = (frozenset(one.convolutions) for one in (own, other))
        if here != there:
            only = {first: sorted(here - there), rank: sorted(there - here)}
            each = (f"{_some(names)} on rank {one} only" for one, names in only.items() if names)
            return [f"the convolutions differ: {', '.join(each)}"]
        if own.convolutions != other.convolutions:
            return [f"the convolutions come in another order on rank {rank} than on rank {first}"]
    return []


def by_rank(values: Mapping[int, str]) -> str:
    """Return text that lists each value with its ranks, the most frequent value last.

    >>> by_rank({0: "2", 1: "1", 2: "2"})
    '1 on rank 1, 2 on ranks 0, 2'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    few_first = sorted(ranks.items(), key=lambda item: (len(item[1]), item[1]))
    named = [f"{value[:_LONGEST]} on {ranks_in_words(of)}" for value, of in few_first]
    return ", ".join([*named[:_MOST_SHOWN], *(["others elsewhere"] if len(named) > _MOST_SHOWN else [])])


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return the numbers of ranks as part of a sentence.

    >>> ranks_in_words([2]), ranks_in_words([0, 1, 3])
    ('rank 2', 'ranks 0, 1, 3')
    """
    each = sorted(ranks)
    return f"rank{'s' * (len(each) != 1)} {', '.join(map(str, each))}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_SHOWN
    return ", ".join(map(shown, names[:_MOST_SHOWN])) + (f" and {more} more" if more > 0 else "")
