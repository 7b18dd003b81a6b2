"""What a training step keeps of its forward pass within a budget, and what it computes again.

    memory at a value = all else + kept values before it + computed ones of its run + the value, if it is not stored
    time              = sum of the times of what is computed again

"All else" is in use while the value is computed again, or while a gradient is computed from it. In the forward pass, a
value that is dropped is there until the last value that reads it.

The backward pass reads values in the reverse of the order in which the forward pass has computed them. A *run* is a
series of values of which some are dropped, between points at which whatever is read later has been kept. When the
backward pass first reads a dropped value of a run, it is computed from what was kept, and so is what that needs (Chen
et al., *Training Deep Nets with Sublinear Memory Cost*, 2016).

``least_time`` finds the choices by dynamic programming over the values, with states (kept bytes, bytes of the run) and
the least time of each, for each set of choices of the values that are read later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mucudnn.core.errors import InvalidInputError

CELLS = 96  # parts of a budget
FEW = 300  # states, up to which all that may be of use are told apart
MOST = 10_000  # states that go on, half of them the fastest, half those of the fewest bytes


class Choice(Enum):
    """Whether a value is kept, computed again once, when it is first read, or each time it is read."""

    KEPT = "kept"
    ONCE = "computed again"
    EACH_TIME = "computed again each time"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the forward pass.

    size_bytes: of the tensor.
    time_s: to compute it again.
    reads: the values from which it is computed, by index.
    is_used: whether the backward pass reads it, not only to compute others again.
    backward_bytes: of all else while the backward pass uses it.
    forward_bytes: of all else when the forward pass has computed it.
    computing_bytes: of all else while it is computed again.
    may_be_dropped: whether it can be computed again.
    """

    size_bytes: int
    time_s: float
    reads: tuple[int, ...] = ()
    is_used: bool = True
    backward_bytes: int = 0
    forward_bytes: int = 0
    computing_bytes: int = 0
    may_be_dropped: bool = True


@dataclass(frozen=True, slots=True)
class Keeping:
    """The choices of all values.

    time_s: of what is computed again.
    peak_bytes: predicted.
    proven: whether no other choices within the budget take less time.
    """

    choices: tuple[Choice, ...]
    time_s: float
    peak_bytes: int
    proven: bool = True


def least_time(values: Sequence[Value], budget_bytes: int, cells: int = CELLS) -> Keeping | None:
    """Return the choices within the budget that take the least time; None if there are none.

    cells: parts of the budget by which states are told apart if there are many: of those in the same part, in kept
        bytes and in bytes of the run, the fastest goes on. No state exceeds the budget.

    Raises ``InvalidInputError`` if a value reads itself or a later one.
    """
    for index, value in enumerate(values):
        if any(not 0 <= read < index for read in value.reads):
            raise InvalidInputError(f"value {index} reads {value.reads}; it may read earlier values only")
    slots = _Slots(values)
    states, proven = _States.first(), slots.have_all
    steps: list[_States] = []
    for index in range(len(values)):
        allowed = list(Choice) if slots.may_be_dropped(index) else [Choice.KEPT]
        reached = [_after(states, values, index, choice, budget_bytes, slots) for choice in allowed]
        steps.append(states)
        states, is_exact = _States.joined(reached).undominated(budget_bytes, cells)
        proven &= is_exact and len(states.time_s) <= MOST
        if len(states.time_s) > MOST:
            orders = np.argsort(states.time_s), np.argsort(states.kept + states.run)
            states = states.at(np.unique(np.concatenate([order[: MOST // 2] for order in orders])))
        if not len(states.time_s):
            return None
    place = int(np.lexsort((states.kept, states.time_s))[0])
    time_s, choices = float(states.time_s[place]), list[Choice]()
    for before in reversed(steps):
        choices.append(list(Choice)[states.choice[place]])
        states, place = before, int(states.origin[place])
    made = tuple(reversed(choices))
    return Keeping(made, time_s, peak_bytes(values, made), proven)


def least_memory(values: Sequence[Value], cells: int = CELLS) -> Keeping:
    """Return the choices of the least memory, up to a part in ``cells``, and of the least time within that."""
    timeless = [replace(value, time_s=0.0) for value in values]
    choices = (Choice.KEPT,) * len(values)
    low, high = 0, peak_bytes(values, choices)
    while high - low > max(1, high // cells):
        middle = (low + high) // 2
        keeping = least_time(timeless, middle, cells)
        if keeping is None:
            low = middle
        else:
            choices, high = keeping.choices, keeping.peak_bytes
    # Where states are thinned out by their times, none may be left within these bytes.
    return least_time(values, high, cells) or Keeping(choices, recomputation_s(values, choices), high, proven=False)


def peak_bytes(values: Sequence[Value], choices: Sequence[Choice]) -> int:
    """Return the memory that a step needs with these choices, at its peak."""
    return max(peaks_bytes(values, choices), default=0)


def peaks_bytes(values: Sequence[Value], choices: Sequence[Choice]) -> list[int]:
    """Return the most memory that a step needs for each value with these choices, forward and backward."""
    last, read_later = last_reads(values), dict[int, bool]()
    kept = run = 0
    peaks = []
    for index, (value, choice) in enumerate(zip(values, choices, strict=True)):
        dropped = (read for read in read_later if choices[read] is not Choice.KEPT and last[read] > index)
        waiting_bytes = sum(values[read].size_bytes for read in dropped)
        in_forward = kept + waiting_bytes + value.size_bytes + value.forward_bytes
        kept += value.size_bytes * (choice is Choice.KEPT)
        run += value.size_bytes * (choice is Choice.ONCE)
        each_time = [values[read] for read in value.reads if choices[read] is Choice.EACH_TIME]
        beside = max(_beside(value, choice), _beside_computing(value, choice, each_time))
        peaks.append(max(in_forward, kept + run + beside))
        read_later[index] = _is_open(choice, (read_later[read] for read in value.reads))
        if not any(is_open for read, is_open in read_later.items() if last[read] > index):
            run = 0
    return peaks


def recomputation_s(values: Sequence[Value], choices: Sequence[Choice]) -> float:
    """Return the seconds of what is computed again with these choices."""
    time_s = 0.0
    for value, choice in zip(values, choices, strict=True):
        if choice is not Choice.KEPT:
            each_time = (values[read].time_s for read in value.reads if choices[read] is Choice.EACH_TIME)
            time_s += value.time_s * (choice is Choice.ONCE or value.is_used) + sum(each_time)
    return time_s


def last_reads(values: Sequence[Value]) -> list[int]:
    """Return the last value that reads each value; the value itself if there is none."""
    last = list(range(len(values)))
    for index, value in enumerate(values):
        for read in value.reads:
            last[read] = index
    return last


def _beside(value: Value, choice: Choice) -> int:
    """Return the bytes in use while the backward pass uses a value, beside what is stored."""
    if not value.is_used:
        return 0
    return value.backward_bytes + value.size_bytes * (choice is Choice.EACH_TIME)


def _beside_computing(value: Value, choice: Choice, each_time: Sequence[Value]) -> int:
    """Return the bytes in use while a value is computed again, beside what is stored.

    each_time: the values that it reads of those that are computed each time.
    """
    if choice is Choice.KEPT or (choice is Choice.EACH_TIME and not value.is_used):  # then with those that read it
        return 0
    beside = value.size_bytes * (choice is Choice.EACH_TIME) + sum(read.size_bytes for read in each_time)
    return beside + max(one.computing_bytes for one in (value, *each_time))


def _is_open(choice: Choice, reads: Iterable[bool]) -> bool:
    """Return whether a run goes on with a value, of whose reads it goes on with those that are true."""
    return choice is Choice.ONCE or (choice is Choice.EACH_TIME and any(reads))


# States


class _Slots:
    """Where states have the choices of the values that are read later: two bits each, 0 for what is kept.

    The lower bit is set if a run goes on with the value, the higher one if it is computed each time. What must be kept
    has no slot, nor do values for which none is left, which are kept, too.

    of: the slot of each value, -1 without.
    freed: by each value, as a mask.
    waiting: at each value, the earlier ones with slots that later ones read.
    have_all: whether there was a slot for each value that may be dropped.
    """

    MOST = 31

    def __init__(self, values: Sequence[Value]) -> None:
        self.values, self.last = values, last_reads(values)
        self.of, self.freed, self.have_all = [-1] * len(values), [0] * len(values), True
        self.waiting = list[list[int]]()
        free, used = list(range(self.MOST)), set[int]()
        for index, value in enumerate(values):
            ended = {read for read in used if self.last[read] == index}
            self.waiting.append(sorted(used - ended))
            if value.may_be_dropped and self.last[index] > index:
                self.have_all &= bool(free)
                if free:
                    self.of[index] = free.pop()
                    used.add(index)
            self.freed[index] = sum(3 << 2 * self.of[read] for read in ended)
            free += [self.of[read] for read in ended]
            used -= ended

    def may_be_dropped(self, index: int) -> bool:
        return self.values[index].may_be_dropped and (self.of[index] >= 0 or self.last[index] == index)


_OPEN = int("01" * _Slots.MOST, 2)


@dataclass(frozen=True, slots=True)
class _States:
    """States after a value, as columns.

    choices: of the values that are read later, as in ``_Slots``.
    kept, run: bytes that are kept, and those of the run.
    time_s: the least time.
    choice, origin: the last choice, and the state before it.
    """

    choices: NDArray[np.int64]
    kept: NDArray[np.int64]
    run: NDArray[np.int64]
    time_s: NDArray[np.float64]
    choice: NDArray[np.int8]
    origin: NDArray[np.int64]

    @classmethod
    def first(cls) -> _States:
        zero = np.zeros(1, np.int64)
        return cls(zero, zero, zero, np.zeros(1), np.zeros(1, np.int8), zero)

    @classmethod
    def joined(cls, parts: Sequence[_States]) -> _States:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def at(self, places: NDArray[Any]) -> _States:
        return _States(*(getattr(self, name)[places] for name in self.__slots__))

    def undominated(self, budget_bytes: int, cells: int) -> tuple[_States, bool]:
        """Return the states that may be of use, and whether none of the others would have been."""
        if len(self.kept) <= FEW:
            return self.at(_pareto(self)), True
        step = max(1, -(-budget_bytes // cells))
        kept, run = self.kept // step, self.run // step
        order = np.lexsort((self.run, self.kept, self.time_s, run, kept, self.choices))
        columns = np.stack((self.choices, kept, run))[:, order]
        is_first = np.r_[True, np.any(columns[:, 1:] != columns[:, :-1], axis=0)]
        first = order[is_first][np.cumsum(is_first) - 1]  # of each cell
        is_exact = bool(np.all((self.kept[first] <= self.kept[order]) & (self.run[first] <= self.run[order])))
        fastest = order[is_first]
        starts = np.flatnonzero(np.r_[True, np.diff(self.choices[fastest]) != 0])
        lengths = np.diff(np.r_[starts, len(fastest)])
        useful = [fastest[starts[lengths == 1]]]
        for start, length in zip(starts[lengths > 1], lengths[lengths > 1], strict=True):
            alike = fastest[start : start + length]
            times = np.full((cells + 2, cells + 2), np.inf)
            rows, columns = kept[alike] + 1, run[alike] + 1
            times[rows, columns] = self.time_s[alike]
            least = np.minimum.accumulate(np.minimum.accumulate(times, 0), 1)
            useful.append(alike[least[rows - 1, columns - 1] > self.time_s[alike]])
        return self.at(np.concatenate(useful)), is_exact


def _pareto(states: _States) -> NDArray[np.int64]:
    """Return the places of the states that none with the same choices betters in bytes and time."""
    columns = np.stack((states.kept, states.run, states.time_s))
    order = np.lexsort((*columns, states.choices))
    useful: list[int] = []
    for place in order:
        others = [other for other in useful if states.choices[other] == states.choices[place]]
        if not np.any(np.all(columns[:, others] <= columns[:, [place]], axis=0)):
            useful.append(int(place))
    return np.array(useful, np.int64)


def _after(
    states: _States, values: Sequence[Value], index: int, choice: Choice, budget_bytes: int, slots: _Slots
) -> _States:
    """Return the states after a choice for a value, those that are within the budget."""
    value, is_kept = values[index], choice is Choice.KEPT
    kept = states.kept + value.size_bytes * is_kept
    run = states.run + value.size_bytes * (choice is Choice.ONCE)
    time_s = states.time_s.copy()
    is_open = np.full(len(kept), choice is Choice.ONCE)
    in_forward = states.kept + value.size_bytes + value.forward_bytes
    for earlier in slots.waiting[index]:
        in_forward += values[earlier].size_bytes * ((states.choices >> 2 * slots.of[earlier] & 3) != 0)
    within = in_forward <= budget_bytes
    within &= kept + run + _beside(value, choice) <= budget_bytes
    if not is_kept:
        is_computed = choice is Choice.ONCE or value.is_used
        computing = np.full(len(kept), value.computing_bytes)
        beside = kept + run + value.size_bytes * (choice is Choice.EACH_TIME)
        time_s += value.time_s * is_computed
        for read in (read for read in value.reads if slots.of[read] >= 0):
            of_read = states.choices >> 2 * slots.of[read]
            if choice is Choice.EACH_TIME:  # not of what is computed each time, or times would multiply
                within &= of_read & 2 == 0
                is_open |= of_read & 1 == 1
            is_each_time = of_read >> 1 & 1
            time_s += values[read].time_s * is_each_time
            beside += values[read].size_bytes * is_each_time
            computing = np.maximum(computing, values[read].computing_bytes * is_each_time)
        if is_computed:
            within &= beside + computing <= budget_bytes
    choices = states.choices & ~slots.freed[index]
    if slots.of[index] >= 0:
        choices |= (is_open.astype(np.int64) | 2 * (choice is Choice.EACH_TIME)) << 2 * slots.of[index]
    run = np.where(choices & _OPEN, run, 0)
    of_choice = np.full(len(kept), list(Choice).index(choice), np.int8)
    return _States(choices, kept, run, time_s, of_choice, np.arange(len(kept))).at(within)
