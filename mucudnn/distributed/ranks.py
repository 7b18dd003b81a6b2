"""Cooperation of the ranks of a torch.distributed process group: exchange messages, divide work, check agreement.

The folder ``tuning`` decides what is measured and chosen; torch.distributed sends the messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import chain
from traceback import clear_frames
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist

from mucudnn.core.errors import InvalidInputError, SharingError, first_line
from mucudnn.core.tables import listed
from mucudnn.core.team import ALONE, Team
from mucudnn.core.values import grouped, shown

T = TypeVar("T")

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # by type of device
_TIMEOUT_S = 86400.0  # the other ranks wait while the first one tunes
_TAG = 20181001  # tag of our messages, unlikely to be used by others
_HERE, _ENDED, _LATE = range(3)  # state of a rank
_IN_WORDS = {_ENDED: "ended", _LATE: "did not come within the timeout of the process group"}
_MOST_SHOWN = 3  # different values of one setting, or convolutions
_LONGEST = 120  # characters of a value in an error
_TUNE_APART = "Config(share_tuning=False) lets each rank tune for itself"


def ranks_of(group: object = None) -> Team:
    """Return the ranks of a process group, by default the default group; this process alone if it has no other.

    Raises ``InvalidInputError`` if this process is not in the group.
    """
    joined_group = group_of_this_process(group)
    return ALONE if dist.get_world_size(joined_group) == 1 else Ranks(joined_group)


def deal(costs: Sequence[float], ranks: int) -> list[int]:
    """Deal pieces of work to ranks, and return the rank (from 0) of each piece.

    Pieces are dealt in descending order of cost, each to the least loaded rank, or the one with the fewest pieces among
    equal loads. The last rank ends at most 4/3 - 1/(3 ranks) times as late as in the best schedule (Graham, 1969). The
    result is deterministic.

    costs: cost of each piece, in any unit.

    >>> deal([1, 5, 3, 3], ranks=2)
    [0, 0, 1, 1]
    """
    loads = [(0.0, 0, rank) for rank in range(ranks)]  # cost, number of pieces
    ranks_of = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        load, count, rank = min(loads)
        ranks_of[piece] = rank
        loads[rank] = load + costs[piece], count + 1, rank
    return ranks_of


class Ranks(Team):
    """Several ranks of a process group.

    If the group's backend is not gloo, messages go over another group, since they are objects in host memory.

    Every method raises ``SharingError`` on all remaining ranks if a rank has failed, ended or timed out.

    rank: number of this rank in the group.
    is_first: whether this rank is the first among the ranks on its kind of device.
    is_writer: whether it writes to the database.
    """

    are_several = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self._group = _with_gloo(group, self._ranks)
        self.rank, self.size = dist.get_rank(group), len(self._ranks)
        self._kinds: Sequence[Sequence[int]] = [range(self.size)]
        self._mates = self._kinds[0]
        self._is_over = False
        self.is_first = self.is_writer = self.rank == 0

    def meet(self, fingerprint: Fingerprint) -> None:
        """Exchange fingerprints to find the ranks on this kind of device, and the rank that writes to the database.

        Raises ``SharingError``, naming ranks and values, if settings that must be equal differ.
        """
        fingerprints = [Fingerprint.from_plain(plain) for plain in self.gather(asdict(fingerprint))]
        require_alike(fingerprints, _TUNE_APART)
        by_kind = kinds(fingerprints)
        self._kinds, self._mates = [*by_kind.values()], by_kind[fingerprint.kind]
        self.is_first = self._mates[0] == self.rank
        places = [rank_fingerprint.place for rank_fingerprint in fingerprints]
        self.is_writer = places.index(fingerprint.place) == self.rank

    def own(self, costs: Sequence[float]) -> list[int]:
        """Return the numbers of the pieces of work that this rank does.

        costs: cost of each piece; ranks on one kind of device use the costs of their first rank.
        """
        (costs, *_) = self.of_kind(self.gather(costs))
        mine = self._mates.index(self.rank)
        return [piece for piece, rank in enumerate(deal(costs, len(self._mates))) if rank == mine]

    def of_kind(self, gathered: Sequence[T]) -> list[T]:
        """Select the messages of the ranks on this kind of device from the messages of all ranks."""
        return [gathered[rank] for rank in self._mates]

    def require_same(self, setting: str, value: str, remedy: str) -> None:
        values = dict(enumerate(self.gather(value)))
        if len({*values.values()}) > 1:
            raise SharingError(f"{setting} is {by_rank(values)}; {remedy}")

    def agree(self, choices: Mapping[str, str]) -> None:
        """Require equal tuned choices on all ranks with the same kind of device, as the last exchange of messages.

        choices: by convolution.

        Raises ``SharingError`` on every rank, with the first difference, if they differ.
        """
        by_number = self.gather(choices)
        self._is_over = True
        for ranks in self._kinds:
            for name in dict.fromkeys(name for rank in ranks for name in by_number[rank]):
                values = {rank: by_number[rank].get(name, "nothing") for rank in ranks}
                if len({*values.values()}) > 1:
                    raise SharingError(f"the ranks chose differently: {name}: {by_rank(values)}; please report this")

    def gather(self, message: T) -> list[T]:
        """Send a message to all ranks, and return the messages of all ranks, by rank.

        Raises ``SharingError`` on every remaining rank if a rank has failed, ended or timed out.
        """
        try:
            said = self._gather((message, None))
        except SharingError:
            self._is_over = True
            raise
        failures = {rank: why for rank, (_, why) in enumerate(said) if why is not None}
        if failures:
            self._is_over = True
            reasons = "; ".join(f"rank {rank}: {why}" for rank, why in failures.items())
            raise SharingError(
                f"tuning failed on another rank and was stopped on all: {reasons}. Measurements so far are stored",
                failures,
            )
        return [cast(T, message) for message, _ in said]

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Send an error raised in the block to the other ranks in place of the next message, so that they stop waiting.

        Not sent are errors that all ranks know, errors after ``agree``, and Ctrl-C, which ends this process.
        """
        try:
            yield
        except Exception as error:
            if not self._is_over:
                self._is_over = True
                with suppress(SharingError):
                    self._gather((None, f"{type(error).__name__}: {first_line(error)}"))
            raise

    def again(self) -> Self:
        team = copy(self)
        team._is_over = False
        return team

    def _gather(self, said: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
        self._meet()
        messages: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(messages, said, group=self._group)
        except RuntimeError as error:
            raise SharingError(f"a rank ended while the ranks exchanged messages: {first_line(error)}") from error
        return messages

    def _meet(self) -> None:
        """Wait until all ranks have called this; rank 0 waits for all others and tells them which ranks are missing.

        A rank that ends closes its connections, so that others notice its end before the timeout.
        """
        if self.rank == 0:
            greetings = torch.empty(self.size, 1, dtype=torch.uint8)  # kept alive for asynchronous writes
            waiting = [self._receive(rank, greetings[rank]) for rank in range(1, self.size)]
            timeout = _timeout(self._group)
            fates = [_HERE, *(_fate(greeting, timeout) for greeting in waiting)]
            verdict = torch.tensor(fates, dtype=torch.uint8)
            for rank in (rank for rank, fate in enumerate(fates) if rank and fate == _HERE):
                with suppress(RuntimeError):  # the next exchange detects a lost rank
                    dist.send(verdict, self._ranks[rank], self._group, _TAG)
        else:
            verdict = torch.zeros(self.size, dtype=torch.uint8)
            try:
                dist.send(torch.ones(1, dtype=torch.uint8), self._ranks[0], self._group, _TAG)
                fate = _fate(self._receive(0, verdict), 2 * _timeout(self._group))  # since rank 0 waits for the others
            except RuntimeError as error:
                fate = _fate_by(error)
            verdict[0] = fate
        missing = [(rank, _IN_WORDS[fate]) for rank, fate in enumerate(verdict.tolist()) if fate != _HERE]
        if missing:
            reasons = "; ".join(f"rank {rank} {why}" for rank, why in missing)
            hint = " (if it was waiting for another rank, its own message names that one)" if missing[0][0] == 0 else ""
            raise SharingError(
                f"{reasons}{hint}: the other ranks waited for it to tune together. Measurements so far are stored: "
                f"start again to continue. All ranks must tune the same model; {_TUNE_APART}"
            )

    def _receive(self, rank: int, into: torch.Tensor) -> dist.Work | RuntimeError:
        try:
            return cast(dist.Work, dist.irecv(into, self._ranks[rank], self._group, _TAG))
        except RuntimeError as error:
            return error


def _fate(waiting: dist.Work | RuntimeError, timeout: timedelta) -> int:
    """Wait for a message from another rank; return that rank's state: here, ended or late."""
    try:
        if isinstance(waiting, RuntimeError):
            raise waiting
        waiting.wait(timeout)
    except RuntimeError as error:
        return _fate_by(error)
    return _HERE


def _fate_by(error: RuntimeError) -> int:
    return _LATE if "timed out" in str(error).lower() or "timeout" in str(error).lower() else _ENDED


def _timeout(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def group_of_this_process(group: object) -> dist.ProcessGroup:
    """Return a process group, the default one for None. Raises ``InvalidInputError`` if this process is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidInputError(f"process_group is {shown(group)}; call torch.distributed.init_process_group first")
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0:
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, dist.ProcessGroup):
        raise InvalidInputError("this process is not a member of process_group: call this on its ranks only")
    raise InvalidInputError(f"process_group is {shown(group)}; give one of torch.distributed, or None for all ranks")


def _with_gloo(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the group if its backend is gloo, or else a gloo group of the same ranks, which is made once.

    Torch can make a group only on all ranks together, so none can be made here for a subset of the ranks.
    """
    if dist.get_backend(group) == "gloo":
        return group
    if len(ranks) < dist.get_world_size():
        raise InvalidInputError(
            f"process_group has {len(ranks)} of {dist.get_world_size()} ranks and backend "
            f"{dist.get_backend(group)}, which exchanges only GPU tensors: give a group with the same ranks and "
            "backend gloo, made on all ranks by torch.distributed.new_group(ranks, backend='gloo')"
        )
    if group not in _gloo_groups:
        _gloo_groups[group] = dist.new_group(backend="gloo")
    return _gloo_groups[group]


_gloo_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


# Agreement of the settings


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Description of a rank, sent as plain text so that other versions of mucudnn can read it.

    kind: kind of the rank's device; ranks of one kind share measurements.
    place: the rank's host and database file.
    everywhere: settings that must be equal on all ranks, by name.
    in_kind: settings that must be equal on ranks of one kind.
    convolutions: the convolutions to tune, also equal on ranks of one kind.
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
        return cls(**{name: plain[name] for name in cls.__slots__ if name in plain})


def kinds(fingerprints: Sequence[Fingerprint]) -> dict[str, list[int]]:
    """Return the rank numbers by kind of device, ascending for each kind."""
    return grouped((fingerprint.kind, rank) for rank, fingerprint in enumerate(fingerprints))


def require_alike(fingerprints: Sequence[Fingerprint], remedy: str) -> None:
    """Raise ``SharingError`` with the settings that wrongly differ, the ranks of each value, and a remedy."""
    differences = _differing({rank: fingerprint.everywhere for rank, fingerprint in enumerate(fingerprints)})
    for ranks in kinds(fingerprints).values():
        in_kind = _differing({rank: fingerprints[rank].in_kind for rank in ranks})
        differences += in_kind or _other_convolutions({rank: fingerprints[rank].convolutions for rank in ranks})
    if differences:
        raise SharingError(
            f"ranks that tune together must be alike: {'; '.join(differences)}. Start them alike; {remedy}"
        )


def _differing(settings: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return a text for each setting that differs.

    settings: by rank, the values by name.
    """
    differences = []
    for name in dict.fromkeys(chain.from_iterable(settings.values())):
        values = {rank: values_by_name.get(name, "unknown") for rank, values_by_name in settings.items()}
        if len({*values.values()}) > 1:
            differences.append(f"{name} is {by_rank(values)}")
    return differences


def _other_convolutions(convolutions: Mapping[int, Sequence[str]]) -> list[str]:
    """Compare each rank's convolutions with the first rank's; list some that only one of the two tunes."""
    first, *_ = convolutions
    expected = convolutions[first]
    for rank, names in convolutions.items():
        only = {first: sorted({*expected} - {*names}), rank: sorted({*names} - {*expected})}
        lists = [
            f"{listed([*map(shown, alone)], _MOST_SHOWN)} on rank {number} only"
            for number, alone in only.items()
            if alone
        ]
        if lists:
            return [f"the convolutions differ: {', '.join(lists)}"]
        if names != expected:
            return [f"the convolutions come in another order on rank {rank} than on rank {first}"]
    return []


def by_rank(values: Mapping[int, str]) -> str:
    """Return text that lists each value with its ranks, the most frequent value last.

    >>> by_rank({0: "2", 1: "1", 2: "2"})
    '1 on rank 1, 2 on ranks 0, 2'
    """
    ranks = grouped((value, rank) for rank, value in values.items())
    few_first = sorted(ranks.items(), key=lambda item: (len(item[1]), item[1]))
    named = [f"{value[:_LONGEST]} on {ranks_in_words(numbers)}" for value, numbers in few_first]
    return ", ".join([*named[:_MOST_SHOWN], *(["others elsewhere"] if len(named) > _MOST_SHOWN else [])])


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return the numbers of ranks as part of a sentence.

    >>> ranks_in_words([2]), ranks_in_words([0, 1, 3])
    ('rank 2', 'ranks 0, 1, 3')
    """
    ascending = sorted(ranks)
    return f"rank{'s' * (len(ascending) != 1)} {', '.join(map(str, ascending))}"


# The process group of the ranks that torchrun started


@contextmanager
def freeing_what_failed() -> Iterator[None]:
    """Clear the frames of an error raised in the block, which would keep the model alive.

    A model that outlives its process group may deadlock torch.
    """
    try:
        yield
    except BaseException as error:
        clear_frames(error.__traceback__)
        raise


@contextmanager
def joined(device: str, meeting: str = "env://", timeout_s: float = _TIMEOUT_S) -> Iterator[None]:
    """Join the process group of all ranks started by torchrun, and leave it at the end of the block.

    An existing group is used as it is. A process that torchrun did not start joins a new group of one rank.

    device: ``cpu`` or ``cuda``; on ``cuda`` every rank uses the GPU with its local rank.
    meeting: torch's ``init_method``, the rendezvous of the ranks; ``RANK`` and ``WORLD_SIZE`` come from the
    environment.
    timeout_s: longest wait for another rank, in seconds.

    Raises the errors of ``torch.distributed.init_process_group``.
    """
    if dist.is_initialized():
        yield
        return
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(_BACKENDS[kind], init_method=meeting, rank=rank, world_size=size, timeout=timeout)
    else:
        dist.init_process_group(_BACKENDS[kind], store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with freeing_what_failed():
            yield
    finally:
        dist.destroy_process_group()


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks of the default process group, in rank order; all ranks must call this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
