"""Rules for the values of a row, column by column, and words for what is wrong.

These are the only rules: for what was measured just now, what is stored, merged or imported. Rows are given as they are
exported: the columns of ``schema.EXPORT_COLUMNS`` with numbers and texts, None or nothing where there is none. Samples
are those bytes that are stored (``samples.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from math import inf
from string import hexdigits
from typing import Any

from mucudnn.database import samples, schema
from mucudnn.database.migrations import VERSION
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ITEM_BYTES, ConvProblem, MemoryFormat, Operation
from mucudnn.words.results import METHOD
from mucudnn.words.values import LARGEST, shown

ENVIRONMENT_COLUMNS = tuple(schema.ENVIRONMENT.split(", "))
PROBLEM_COLUMNS = tuple(schema.PROBLEM.split(", "))
_OWNER = ("kind", "measured_at", *ENVIRONMENT_COLUMNS, *PROBLEM_COLUMNS)
_MICRO_CONFIG = tuple(schema.KEYS["measurements"].split(", "))
COLUMNS_OF = {
    "measurement": (*_OWNER, *_MICRO_CONFIG, *schema.COSTS, *schema.CIRCUMSTANCES, *schema.RAW["measurements"]),
    "failure": (*_OWNER, *_MICRO_CONFIG, *schema.OF_FAILURES, "method"),
    "verification": (
        *(*_OWNER, schema.KEYS["verifications"], *schema.TIMES, *schema.CIRCUMSTANCES),
        *schema.RAW["verifications"],
    ),
    "confirmation": (
        *("kind", "measured_at", *ENVIRONMENT_COLUMNS),
        *(schema.KEYS["confirmations"], "versions", "findings", *schema.CIRCUMSTANCES),
    ),
}

_EXPORTED_ONLY = frozenset(schema.EXPORT_COLUMNS) - frozenset(schema.ROW_COLUMNS)
_OWN_COLUMNS = {
    kind: ("measured_at", *(column for column in columns if column not in _OWNER))
    for kind, columns in COLUMNS_OF.items()
}
_KNOWN_NAME = {"operation": Operation.FORWARD, "dtype": "float32", "memory_format": MemoryFormat.CONTIGUOUS}


@dataclass(frozen=True, slots=True)
class Rule:
    """A test of a value, and in words which ones are allowed."""

    allows: Callable[[Any], bool]
    allowed: str


def fault(column: str, value: object) -> str | None:
    """Return what is wrong with a value of this column, and what is allowed; None: nothing."""
    rule = RULES[column]
    if rule.allows(value):
        return None
    return f"{column} is {'missing' if value is None else _shown(column, value)}; it must be {rule.allowed}"


def _shown(column: str, value: object) -> str:
    return shown(samples.readable(value) if column in schema.SAMPLE_COLUMNS else value)


def row_faults(row: Mapping[str, Any]) -> list[str]:
    """Return everything that is wrong with a row; empty: nothing."""
    if wrong_kind := fault("kind", row.get("kind")):
        return [wrong_kind]
    return [*_faults_in(row, _EXPORTED_ONLY & row.keys()), *owner_faults(row), *own_faults(row)]


def owner_faults(row: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the environment of a row of a known kind, and with its problem, if it has one."""
    has_problem = PROBLEM_COLUMNS[0] in COLUMNS_OF[row["kind"]]
    if wrong := _faults_in(row, (*ENVIRONMENT_COLUMNS, *(PROBLEM_COLUMNS if has_problem else ()))):
        return wrong
    if not has_problem:
        return []
    not_a_problem = _problem_fault(tuple(row[column] for column in PROBLEM_COLUMNS))
    return [] if not_a_problem is None else [not_a_problem]


def own_faults(row: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a row of a known kind beside its environment and its problem."""
    kind = row["kind"]
    has_none = f"a {kind} has no such value"
    own = _EXPORTED_ONLY.union(COLUMNS_OF[kind])
    foreign = (column for column, value in row.items() if value is not None and column not in own)
    return [*_faults_in(row, _OWN_COLUMNS[kind]), *(f"{c} is {_shown(c, row[c])}; {has_none}" for c in foreign)]


def _faults_in(row: Mapping[str, Any], columns: Iterable[str]) -> list[str]:
    return [wrong for column in columns if (wrong := fault(column, row.get(column)))]


def is_of_another_version(row: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong with a row but names that a later mucudnn may know."""
    unknown = [column for column in _KNOWN_NAME if _is_name(row[column]) and not RULES[column].allows(row[column])]
    known = {column: _KNOWN_NAME[column] for column in unknown}
    if (configuration := _without_unknown_endings(row.get("configuration"))) is not None:
        known["configuration"] = configuration
    return bool(known) and not row_faults({**row, **known})


def _without_unknown_endings(value: object) -> str | None:
    """Return a key of a whole run without what a later mucudnn says of it, such as another epilogue.

    ``None``: it has no such ending, or is no key.
    """
    with suppress(TypeError, ValueError, RecursionError):
        runs = json.loads(value)  # type: ignore[arg-type]
        is_later = any(run[4:] not in schema.ENDINGS and all(map(_is_name, run[4:])) for run in runs)
        return json.dumps([run[:4] for run in runs]) if is_later and json.dumps(runs) == value else None
    return None


def known_problem(values: Sequence[Any]) -> ConvProblem | None:
    """Return the problem of ``PROBLEM_COLUMNS``; None for one that cannot be, or that this version does not know."""
    row = dict(zip(PROBLEM_COLUMNS, values, strict=True))
    return None if _faults_in(row, row) or _problem_fault(tuple(values)) else schema.problem_from(values)


@lru_cache(maxsize=1024)  # rows of one problem are many
def _problem_fault(values: tuple[Any, ...]) -> str | None:
    try:
        schema.problem_from(values)
    except InvalidInputError as error:
        return str(error)
    return None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and (value.isascii() or _can_be_stored(value))


def _can_be_stored(text: str) -> bool:
    """Whether SQLite can store it: JSON can name halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_name(value: object) -> bool:
    return value != "" and _is_text(value)


def _is_time_stamp(value: object) -> bool:
    """Whether ``schema.now`` could have written it: time stamps are compared as text."""
    with suppress(TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(value).astimezone(UTC).isoformat(timespec="microseconds") == value  # type: ignore[arg-type]
    return False


def _is_configuration(value: object) -> bool:
    """Whether ``schema.configuration_key`` could have written it: keys are compared as text."""
    with suppress(TypeError, ValueError, RecursionError):
        runs = json.loads(value)  # type: ignore[arg-type]
        return bool(runs) and all(map(_is_run, runs)) and json.dumps(runs) == value
    return False


def _is_run(run: object) -> bool:
    if not (isinstance(run, list) and len(run) >= 4):
        return False
    numbers = zip(("algorithm", "version", "micro_batch_size", "samples"), run, strict=False)
    return all(RULES[column].allows(value) for column, value in numbers) and run[4:] in schema.ENDINGS


def _is_fingerprint(value: object) -> bool:
    return isinstance(value, str) and len(value) == _DIGITS and set(value) <= {*hexdigits.lower()}


def _is_versions(value: object) -> bool:
    found = _object(value)
    return found is not None and all(map(_is_name, found)) and all(map(RULES["version"].allows, found.values()))


def _is_findings(value: object) -> bool:
    """Whether they are what ``optimizing/kept_confirmation.py`` stores: steps in turns, and calls in place."""
    found = _object(value) or {}
    steps, calls = (found.get("step"), found.get("recorded")), found.get("in_place")
    return (
        all(_is_in_turns(one) and _is_time(one["torch_s"]) for one in steps)  # type: ignore[index]
        and _is_in_turns(found.get("convolutions"))
        and (found.get("over_tuned") is None or _is_cost(found["over_tuned"]))
        and isinstance(calls, list)
        and all(one is None or _is_in_place(one) for one in calls)
    )


def _is_in_place(found: Any) -> bool:
    if not (isinstance(found, dict) and found.keys() == {"operations", "call", "loses"}):
        return False
    operations = found["operations"]
    are_known = isinstance(operations, list) and bool(operations) and all(one in [*Operation] for one in operations)
    return are_known and _is_in_turns(found["call"]) and isinstance(found["loses"], bool)


def _is_in_turns(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and found.keys() == {*_IN_TURNS, "rounds"}
        and all(_is_cost(found[name]) for name in _IN_TURNS)
        and RULES["samples"].allows(found["rounds"])
    )


def _object(value: object) -> dict[str, Any] | None:
    """Return the object that JSON describes; ``None`` where it is no JSON, or describes something else."""
    with suppress(TypeError, ValueError, RecursionError):
        found = json.loads(value)  # type: ignore[arg-type]
        return found if isinstance(found, dict) else None
    return None


_DIGITS = 64  # of a SHA-256
_IN_TURNS = ("torch_s", "time_s", "speedup", "uncertainty")


def _is_cost(value: object) -> bool:
    return (type(value) is float and 0 <= value < inf) or (type(value) is int and 0 <= value <= LARGEST)


def _is_time(value: object) -> bool:
    return _is_cost(value) and value != 0


def is_rate(value: object) -> bool:
    """Whether it can be a rate: runs a second."""
    return _is_time(value)


def _is_share(value: object) -> bool:
    return value is None or (_is_cost(value) and value <= 1)  # type: ignore[operator]


def _are_samples(value: object) -> bool:
    return value is None or samples.are_sound(value)


def _is_clock(value: object) -> bool:
    return value is None or _is_time(value)


def _is_mark(value: object) -> bool:
    return value is None or (type(value) is int and value == 1)


def _is_amount(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value <= LARGEST)


def _one_of(names: Iterable[str]) -> Rule:
    allowed = tuple(map(str, names))
    return Rule(lambda value: value in allowed, "one of " + ", ".join(allowed))


def _whole(least: int, most: int = LARGEST) -> Rule:
    # type, not isinstance: true and false are not numbers here
    bounds = f"at least {least}" if most == LARGEST else f"at least {least} and at most {most}"
    return Rule(lambda value: type(value) is int and least <= value <= most, f"a whole number of {bounds}")


RULES: Mapping[str, Rule] = {
    "schema": _whole(1, VERSION),
    "kind": _one_of(COLUMNS_OF),
    "measured_at": Rule(_is_time_stamp, "a time in UTC to the microsecond, as 2026-01-31T12:00:00.000000+00:00"),
    **dict.fromkeys(ENVIRONMENT_COLUMNS, Rule(_is_text, "text")),
    "threads": _whole(1),
    **dict.fromkeys(PROBLEM_COLUMNS, _whole(1)),
    "operation": _one_of(Operation),
    "padding_h": _whole(0),
    "padding_w": _whole(0),
    "dtype": _one_of(ITEM_BYTES),
    "memory_format": _one_of(MemoryFormat),
    "algorithm": Rule(_is_name, "the name of an algorithm"),
    "version": _whole(0),
    "micro_batch_size": _whole(1),
    **dict.fromkeys(("setup_s", "step_s"), Rule(_is_cost, "seconds, finite and at least 0")),
    **dict.fromkeys(("prepared_bytes", "scratch_bytes"), _whole(0, 2**48)),  # more than any memory; sums fit 64 bits
    **dict.fromkeys(("relative_error", "noise"), Rule(_is_cost, "a number, finite and at least 0")),
    "samples": _whole(1),
    "reason": Rule(_is_text, "text"),
    "configuration": Rule(_is_configuration, 'runs of micro-configs as they are exported, such as [["gemm", 1, 8, 4]]'),
    **dict.fromkeys(("baseline_s", "time_s"), Rule(_is_time, "seconds, finite and above 0")),
    "fingerprint": Rule(_is_fingerprint, f"{_DIGITS} hexadecimal digits"),
    "versions": Rule(_is_versions, 'versions by the names of algorithms, such as {"gemm": 1}'),
    "findings": Rule(_is_findings, "what steps of a model have shown, as they are exported"),
    **dict.fromkeys(("load", "stolen"), Rule(_is_share, "a number from 0 to 1, or nothing where it is unknown")),
    "clock_hz": Rule(_is_clock, "a number, finite and above 0, or nothing where it is unknown"),
    **dict.fromkeys(
        schema.SAMPLE_COLUMNS,
        Rule(_are_samples, "a list of seconds, each finite and at least 0, or nothing where none were kept"),
    ),
    "method": _whole(1, METHOD),
    "passed_over": Rule(_is_mark, "1, or nothing where it was tried"),
    "needed_bytes": Rule(_is_amount, "a whole number of at least 0, or nothing where that was not why"),
}
