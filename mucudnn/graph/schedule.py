"""Schedules: plans made ready to run, with every band resolved and every buffer placed in one arena."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import inf
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mucudnn.core.errors import say_once
from mucudnn.core.values import format_bytes
from mucudnn.graph.capture import flattened
from mucudnn.graph.guards import unshared
from mucudnn.graph.operators import Barrier, Captured, Moments, Ref
from mucudnn.graph.program import Frame, Program, record
from mucudnn.graph.steps import threads_limited
from mucudnn.graph.windows import Convolution, convolutions_of, keep_filters
from mucudnn.kernels.algorithm import Algorithm, Workspace
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.running.workspace import borrowed_workspace, workspace_of
from mucudnn.solver import bands
from mucudnn.solver.bands import Costs, Cut, Ranges, Segment
from mucudnn.solver.placement import Buffer, place
from mucudnn.solver.plans import Overlap, Overlaps, Plan


def solver_graph(
    captured: Captured,
    costs: Mapping[int, tuple[Costs, ...]] = MappingProxyType({}),
    whole_costs: Mapping[int, tuple[Costs, ...]] = MappingProxyType({}),
) -> bands.Graph:
    """Return a captured graph as the solver sees it. costs, whole_costs: by index; operators without cost nothing."""
    direct, results = captured.direct_results, {one.index for one in captured.results if isinstance(one, Ref)}
    described = []
    for index, one in enumerate(captured.operators):
        described.append(
            bands.Vertex(
                reaches=one.reaches() if one.rows else (),
                whole=one.wholes,
                rows=one.rows,
                row_bytes=one.row_bytes(),
                whole_bytes=0 if index in direct else one.whole_bytes(),
                costs=costs.get(index, (Costs(),)),
                whole_costs=whole_costs.get(index, ()),
                align=one.align,
                is_result=index in results,
                aliases=one.aliases,
            )
        )
    return bands.Graph(described, captured.samples)


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of an operator in a segment, by their offsets in the segment's block of the arena.

    held: ``held_rows`` rows of a band, for all its samples; kept: those that the next band needs again. There are none
    of results that are needed as a whole. prepared, scratch: of a convolution by an algorithm of ours. reserved: bytes
    of these two.
    """

    held_rows: int = 0
    kept_rows: int = 0
    held: int = 0
    kept: int = 0
    prepared: int = 0
    scratch: int = 0
    reserved: Workspace = field(default_factory=Workspace)


class Schedule:
    """A plan for a captured graph, ready to run.

    algorithms: of convolutions, by index; None for torch's own. threads: the number of threads for which buffers are
    placed: torch's when the schedule was made. arena_bytes: what the arena has, which is allocated once. budget_bytes:
    what calls with any number of threads may need. memories: of the results, by strides of the arguments. ``run`` may
    be called by several threads.

    limit_bytes: buffers are placed by an integer program if the schedule would need more otherwise.
    """

    def __init__(self, captured: Captured, graph: bands.Graph, plan: Plan, limit_bytes: float = inf) -> None:
        self.captured, self.graph, self.plan = captured, graph, plan
        self.memories = {captured.strides: captured.memories}
        self.operators = captured.operators
        cuts = {index: one.cut for one in plan.segments for index in range(one.start, one.stop)}
        self.algorithms: dict[int, Algorithm | None] = {
            index: one.algorithm(cuts[index]) for index, one in convolutions_of(self.operators).items()
        }
        self.ranges = [
            {} if self.operators[one.start].rows == 0 else dict(graph.ranges(one.start, one.stop, one.cut))
            for one in plan.segments
        ]
        self.overlaps: list[list[Overlap]] = []  # the results of each segment that are written over earlier ones
        for segment, ranges in zip(plan.segments, self.ranges, strict=True):
            found: list[Overlap] = []
            overlaps = Overlaps(graph, segment.stop, segment.cut)
            for index, of_rows in ranges.items():  # from the last
                found = overlaps.add(index, of_rows)
            self.overlaps.append(found)
        self.budget_bytes: float = inf
        self._for_threads: dict[int, Schedule] = {}  # the same with other places, by number of threads
        self._reserve(limit_bytes)

    def _reserve(self, limit_bytes: float) -> None:
        """Place all buffers, for torch's current number of threads."""
        self.threads = torch.get_num_threads()
        blocks = [self._block(*given) for given in zip(self.plan.segments, self.ranges, strict=True)]
        self.buffers, self.block_bytes = [block for block, _ in blocks], [size for _, size in blocks]
        self.outside_bytes = 0  # the most of barriers' results, and of what torch needs for a step, alive together
        for number, segment in enumerate(self.plan.segments):
            live = sum(
                one.whole_bytes
                for index, one in enumerate(self.graph.operators[: segment.stop])
                if isinstance(self.operators[index], (Barrier, Moments)) and self.graph.last_use[index] >= segment.start
            )
            extra = max((self._extra_bytes(index, number) for index in range(segment.start, segment.stop)), default=0)
            self.outside_bytes = max(self.outside_bytes, live + extra)
        self._place(limit_bytes - self.outside_bytes)
        self._programs: dict[Any, Program] = {}  # by strides of the arguments
        self._timed: Program | None = None

    def _block(self, segment: Segment, ranges: Mapping[int, Ranges]) -> tuple[dict[int, Buffers], int]:
        """Place the buffers of a segment in a block of memory, by operator, and return them and the block's bytes.

        Bands and scratch are placed by lifetime; what is kept is there while the segment runs.
        """
        fields: dict[int, dict[str, Any]] = {}  # of ``Buffers``
        sized: dict[tuple[int, str], Buffer] = {}
        for index in sorted(ranges):
            one, cut, step = self.operators[index], segment.cut, index - segment.start
            rows, row_bytes = ranges[index], self.graph.operators[index].row_bytes * cut.samples
            fields[index] = {}
            if not self.graph.is_whole(index, segment.stop):
                fields[index] |= {"held_rows": rows.held, "kept_rows": rows.kept}
                readers = [reader for reader, _ in self.graph.readers[index] if reader < segment.stop]
                last = max(readers, default=index) - segment.start
                sized[index, "held"] = Buffer(rows.held * row_bytes, step, last)
                sized[index, "kept"] = Buffer(rows.kept * row_bytes, 0, segment.stop)
            if isinstance(one, Convolution) and (algorithm := self.algorithms[index]):
                stages = (one.stage(algorithm, *call) for call in self._calls(one, index, rows, cut))
                scratch = max((workspace.scratch_bytes for _, workspace in stages), default=0)
                reserved = Workspace(one.prepared_bytes(algorithm), scratch)
                sized[index, "prepared"] = Buffer(reserved.prepared_bytes, 0, segment.stop)
                sized[index, "scratch"] = Buffer(reserved.scratch_bytes, step, step)
                fields[index]["reserved"] = reserved
        offsets, size = place([*sized.values()])
        for (index, name), offset in zip(sized, offsets, strict=True):
            fields[index][name] = offset
        return {index: Buffers(**given) for index, given in fields.items()}, size

    def _calls(self, one: Convolution, index: int, rows: Ranges, cut: Cut) -> set[tuple[int, int, int, int]]:
        """Return samples, rows read, rows written and padding above of the calls of our algorithm."""
        n, calls = self.captured.samples, set[tuple[int, int, int, int]]()
        for new, high in zip(rows.new.tolist(), rows.high.tolist(), strict=True):
            if high > new:
                first, last = self.read(index, 0, new, high, cut)
                for samples in {min(cut.samples, n), n % cut.samples or cut.samples}:
                    calls.add((samples, last - first, high - new, one.above(new, first)))
        return calls

    def read(self, index: int, position: int, new: int, high: int, cut: Cut) -> tuple[int, int]:
        """Return the rows of a source that an operator reads to compute rows new to high - 1."""
        reach = self.graph.operators[index].reaches[position]
        if cut.bands == 1:
            return 0, self.operators[reach.source].shape[2]
        return int(reach.first[new]), int(reach.last[high - 1])

    def _place(self, limit_bytes: float) -> None:
        """Place whole results and the segments' blocks in the arena."""
        segment_of = {
            index: number for number, one in enumerate(self.plan.segments) for index in range(one.start, one.stop)
        }
        last = len(self.plan.segments)
        indices, buffers = [], []
        for index, described in enumerate(self.graph.operators):
            one, number = self.operators[index], segment_of[index]
            is_stored = one.rows and not isinstance(one, Moments) and index not in self.captured.direct_results
            if is_stored and self.graph.is_whole(index, self.plan.segments[number].stop):
                end = segment_of.get(self.graph.last_use[index], last)
                indices.append(index)
                buffers.append(Buffer(described.whole_bytes, number, end))
        blocks = [Buffer(size, number, number) for number, size in enumerate(self.block_bytes)]
        numbers = {index: number for number, index in enumerate(indices)}
        overlaps = {
            (numbers[one.read], numbers[one.written]): one.distance_bytes
            for of_segment in self.overlaps
            for one in of_segment
        }
        offsets, self.arena_bytes = place([*buffers, *blocks], overlaps, limit_bytes)
        self.whole = dict(zip(indices, offsets, strict=False))
        self.starts = offsets[len(buffers) :]

    def count(self, arguments: tuple[Any, ...]) -> Any:
        """Run once, and raise ``outside_bytes`` to what torch's allocator counts, if it counts more than predicted.

        Returns the model's output.
        """
        workspace_of(self.arena_bytes, self.captured.device, keeps=True)
        self._keep_filters()  # which are not the call's
        if self.captured.device.type == "cuda":
            self.run(arguments)  # what libraries need in their first call only is not counted
        gc.collect()  # what is freed during the call counts against it
        found: list[Any] = []
        peak = peak_allocated_bytes(lambda: found.append(self.run(arguments)), self.captured.device.type)
        storages = [one.untyped_storage() for one in tree_leaves(found) if isinstance(one, Tensor)]
        own = {one.data_ptr(): one.nbytes() for one in storages}
        for given in tree_leaves(arguments):
            if isinstance(given, Tensor):
                own.pop(given.untyped_storage().data_ptr(), None)
        self.outside_bytes = max(peak - sum(own.values()), self.outside_bytes)
        return found[0]

    def _keep_filters(self) -> None:
        convolutions = convolutions_of(self.operators)
        used = ((convolutions[index], algorithm) for index, algorithm in self.algorithms.items())
        keep_filters((one, algorithm) for one, algorithm in used if algorithm is not None)

    def forget_other_filters(self) -> None:
        """Free the prepared filters that are kept for algorithms that this schedule does not run."""
        convolutions, used = convolutions_of(self.operators), dict[int, set[str]]()
        for index, algorithm in self.algorithms.items():
            names = used.setdefault(id(convolutions[index]._kept), set())
            names.update(() if algorithm is None else (algorithm.name,))
        for one in convolutions.values():
            one.forget(except_for=used[id(one._kept)])

    def _extra_bytes(self, index: int, number: int) -> int:
        one, cut = self.operators[index], self.plan.segments[number].cut
        if self.algorithms.get(index) is not None:
            return 0
        costs = self.graph.operators[index].costs_of(cut)
        if one.rows == 0:
            return costs.scratch_bytes
        rows = int(self.ranges[number][index].computed.max()) * cut.samples
        return costs.scratch_bytes + costs.scratch_row_bytes * rows

    def segment_bytes(self) -> list[int]:
        """Return the bytes in use while each segment runs: whole results, bands, kept rows, filters and scratch."""
        found = []
        for number, segment in enumerate(self.plan.segments):
            whole = sum(
                one.whole_bytes
                for index, one in enumerate(self.graph.operators[: segment.stop])
                if self.graph.last_use[index] >= (segment.start if index < segment.start else segment.stop)
            )
            extra = (self._extra_bytes(index, number) for index in range(segment.start, segment.stop))
            saved = sum(one.saved_bytes for one in self.overlaps[number])
            found.append(whole + self.block_bytes[number] + max(extra, default=0) - saved)
        return found

    @property
    def needed_bytes(self) -> int:
        """The peak of activations and workspace, without parameters, arguments and results."""
        return self.arena_bytes + self.outside_bytes

    @cached_property
    def own_memory(self) -> frozenset[int]:
        """The addresses of the memory of all constants."""
        every = (tree_leaves([*vars(one).values()]) for one in self.operators)
        constants = [one for one in chain(self.captured.results, *every) if isinstance(one, Tensor)]
        return frozenset(one.untyped_storage().data_ptr() for one in constants)

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """Return the model's output for arguments of the captured shapes, within ``budget_bytes``.

        It runs with torch's number of threads, or with ``threads`` where that may need more than the budget.
        """
        threads = torch.get_num_threads()
        if threads == self.threads:
            return self._run(arguments)
        schedule = self._for_threads.get(threads)
        if schedule is None:
            schedule = self._for_threads.setdefault(threads, self._placed_again())
        if schedule is not self:
            return schedule._run(arguments)
        say_once(
            f"a graph that was planned for {self.threads} threads may need more than its budget of "
            f"{format_bytes(int(self.budget_bytes))} with {threads}: it runs with {self.threads}; optimize the model "
            f"again with {threads} threads"
        )
        with threads_limited(self.threads):
            return self._run(arguments)

    def _placed_again(self) -> Schedule:
        """Return the schedule with buffers for torch's current number of threads; itself if they need too much.

        What torch's operators allocate with more threads is not known, so a budget holds for fewer threads alone.
        """
        if self.budget_bytes < inf and torch.get_num_threads() > self.threads:
            return self
        made = copy(self)
        made._reserve(self.budget_bytes)
        made.outside_bytes = max(made.outside_bytes, self.outside_bytes)
        return made if made.needed_bytes <= self.budget_bytes else self

    @torch.no_grad()
    def _run(self, arguments: tuple[Any, ...]) -> Any:
        with borrowed_workspace(self.arena_bytes, self.captured.device) as arena:
            frame = Frame(self, flattened(arguments), arena)
            tensors = [one for one in frame.leaves if isinstance(one, Tensor) and one.layout is torch.strided]
            key = tuple([one.stride() for one in tensors])
            program = self._programs.get(key)
            if program is not None:
                program.run(frame)
            else:
                self._keep_filters()
                program = record(frame)
                if len({one.untyped_storage().data_ptr() for one in tensors}) == len(tensors):
                    self._programs[key] = program  # otherwise addresses do not tell arguments apart
            results = [frame[one.index] if isinstance(one, Ref) else one for one in self.captured.results]
            memories = self.memories.get(key, self.captured.memories)
            results = unshared(results, memories, frame.leaves, arena, self.own_memory)
            return tree_map(results.__getitem__, self.captured.template)

    @torch.no_grad()
    def operator_times(self, arguments: tuple[Any, ...]) -> dict[int, float]:
        """Return the seconds of each operator in a call, by index, one after another."""
        with borrowed_workspace(self.arena_bytes, self.captured.device) as arena:
            leaves = flattened(arguments)
            if self._timed is None:
                self._keep_filters()
                self._timed = record(Frame(self, leaves, arena), joins=False)
            return self._timed.timed(Frame(self, leaves, arena))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out programs, which refer to addresses in this process."""
        state = self.__dict__ | {"_programs": {}, "_timed": None, "_for_threads": {}}
        state.pop("own_memory", None)
        return state
