"""Schedules: plans made ready to run, with every band resolved and every buffer placed in one arena."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from mucudnn.core.errors import say_once
from mucudnn.core.values import format_bytes
from mucudnn.graph.capture import flattened
from mucudnn.graph.costed import CostedGraph
from mucudnn.graph.guards import ResultMemory, unshared
from mucudnn.graph.operators.convolution import Convolution, convolutions_of
from mucudnn.graph.operators.operator import Barrier, Moments, Ref
from mucudnn.graph.operators.steps import threads_limited
from mucudnn.graph.program import Frame, Program, record
from mucudnn.kernels.algorithm import Algorithm, Workspace
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.running.workspace import BorrowedWorkspace, workspace_of
from mucudnn.solver.bands import Cut, Ranges, Segment
from mucudnn.solver.placement import Buffer, place
from mucudnn.solver.plans import Overlap, Overlaps, Plan


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of an operator in a segment, by their offsets in the segment's block of the arena.

    held: offset of ``held_rows`` rows of a band, for all its samples. There are none of results that are needed whole.
    kept: offset of ``kept_rows`` rows that the next band needs again.
    prepared: offset of the filter of a convolution by an algorithm of ours.
    scratch: offset of its scratch.
    reserved: bytes of these two.
    """

    held_rows: int = 0
    kept_rows: int = 0
    held: int = 0
    kept: int = 0
    prepared: int = 0
    scratch: int = 0
    reserved: Workspace = field(default_factory=Workspace)


class Schedule:
    """A plan for a captured graph, ready to run, also by several threads at a time.

    algorithms: of convolutions, by index; None for torch's own.
    threads: the number of threads for which buffers are placed: torch's when the schedule was made.
    arena_bytes: what the arena has, which is allocated once.
    budget_bytes: what calls with any number of threads may need.
    memories: of the results, by strides of the arguments.
    """

    def __init__(
        self,
        costed: CostedGraph,
        plan: Plan,
        algorithms: Mapping[int, Algorithm | None] | None = None,
        *,
        limit_bytes: float = inf,
    ) -> None:
        """Make a plan ready.

        algorithms: in place of those for which the plan was made.
        limit_bytes: buffers are placed by an integer program if the schedule would need more otherwise.
        """
        self.costed, self.plan = costed, plan
        self.captured, self.graph = costed.captured, costed.graph
        self.operators = self.captured.operators
        self.memories = {self.captured.strides: self.captured.memories}
        chosen = costed.algorithms(plan) if algorithms is None else algorithms
        self.algorithms = {index: chosen.get(index) for index in convolutions_of(self.operators)}
        self.ranges: list[dict[int, Ranges]] = []  # of the operators of each segment
        self.overlaps: list[list[Overlap]] = []  # the results of each segment that are written over earlier ones
        for segment in plan.segments:
            ranges: dict[int, Ranges] = {}
            overlaps, written = Overlaps(self.graph, segment.stop, segment.cut), list[Overlap]()
            if self.operators[segment.start].rows:
                ranges = dict(self.graph.ranges(segment.start, segment.stop, segment.cut))
            for index, rows in ranges.items():  # from the last
                written = overlaps.add(index, rows)
            self.ranges.append(ranges)
            self.overlaps.append(written)
        self.budget_bytes: float = inf
        self._for_threads: dict[int, Schedule] = {}  # the same with other places, by number of threads
        self._reserve(limit_bytes)

    def _reserve(self, limit_bytes: float) -> None:
        """Place all buffers, for torch's current number of threads."""
        self.threads = torch.get_num_threads()
        blocks = [self._block(segment, ranges) for segment, ranges in zip(self.plan.segments, self.ranges, strict=True)]
        self.buffers, self.block_bytes = [block for block, _ in blocks], [size for _, size in blocks]
        self.outside_bytes = 0  # the most of barriers' results, and of what torch needs for a step, alive together
        for number, segment in enumerate(self.plan.segments):
            live = sum(
                vertex.whole_bytes
                for index, vertex in enumerate(self.graph.operators[: segment.stop])
                if isinstance(self.operators[index], (Barrier, Moments)) and self.graph.last_use[index] >= segment.start
            )
            self.outside_bytes = max(self.outside_bytes, live + self._most_torch_bytes(number))
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
            operator, cut, step = self.operators[index], segment.cut, index - segment.start
            rows, row_bytes = ranges[index], self.graph.operators[index].row_bytes * cut.samples
            fields[index] = {}
            if not self.graph.is_whole(index, segment.stop):
                fields[index] |= {"held_rows": rows.held, "kept_rows": rows.kept}
                readers = [reader for reader, _ in self.graph.readers[index] if reader < segment.stop]
                last = max(readers, default=index) - segment.start
                sized[index, "held"] = Buffer(rows.held * row_bytes, step, last)
                sized[index, "kept"] = Buffer(rows.kept * row_bytes, 0, segment.stop)
            if isinstance(operator, Convolution) and (algorithm := self.algorithms[index]):
                stages = (operator.stage(algorithm, *call) for call in self._calls(operator, index, rows, cut))
                scratch = max((workspace.scratch_bytes for _, workspace in stages), default=0)
                prepared = 0 if index in self.costed.kept else operator.prepared_bytes(algorithm)
                sized[index, "prepared"] = Buffer(prepared, 0, segment.stop)
                sized[index, "scratch"] = Buffer(scratch, step, step)
                fields[index]["reserved"] = Workspace(prepared, scratch)
        offsets, size = place([*sized.values()])
        for (index, name), offset in zip(sized, offsets, strict=True):
            fields[index][name] = offset
        return {index: Buffers(**values) for index, values in fields.items()}, size

    def _calls(self, convolution: Convolution, index: int, rows: Ranges, cut: Cut) -> set[tuple[int, int, int, int]]:
        """Return samples, rows read, rows written and padding above of the calls of our algorithm."""
        n, calls = self.captured.samples, set[tuple[int, int, int, int]]()
        for new, high in zip(rows.new.tolist(), rows.high.tolist(), strict=True):
            if high > new:
                first, last = self.read(index, 0, new, high, cut)
                for samples in {min(cut.samples, n), n % cut.samples or cut.samples}:
                    calls.add((samples, last - first, high - new, convolution.above(new, first)))
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
            index: number
            for number, segment in enumerate(self.plan.segments)
            for index in range(segment.start, segment.stop)
        }
        last = len(self.plan.segments)
        indices, buffers = [], []
        for index, vertex in enumerate(self.graph.operators):
            operator, number = self.operators[index], segment_of[index]
            is_sums, is_direct = isinstance(operator, Moments), index in self.captured.direct_results
            is_whole = self.graph.is_whole(index, self.plan.segments[number].stop)
            if operator.rows and is_whole and not is_sums and not is_direct:
                end = segment_of.get(self.graph.last_use[index], last)
                indices.append(index)
                buffers.append(Buffer(vertex.whole_bytes, number, end))
        blocks = [Buffer(size, number, number) for number, size in enumerate(self.block_bytes)]
        numbers = {index: number for number, index in enumerate(indices)}
        distances = {
            (numbers[overlap.read], numbers[overlap.written]): overlap.distance_bytes
            for overlap in chain.from_iterable(self.overlaps)
        }
        offsets, self.arena_bytes = place([*buffers, *blocks], distances, limit_bytes)
        self.whole = dict(zip(indices, offsets, strict=False))
        self.starts = offsets[len(buffers) :]

    def count(self, arguments: tuple[Any, ...]) -> Any:
        """Run once, and raise ``outside_bytes`` to what torch's allocator counts, if it counts more than predicted.

        Returns the model's output.
        """
        workspace_of(self.arena_bytes, self.captured.device, keeps=True)
        self._keep_filters()  # which are not the call's
        self.run(arguments)  # recording and what libraries need in their first call only are not counted
        results, collects = list[Any](), gc.isenabled()
        gc.disable()  # what else is freed during the call counts against it
        try:
            peak = peak_allocated_bytes(lambda: results.append(self.run(arguments)), self.captured.device.type)
        finally:
            if collects:
                gc.enable()
        storages = [leaf.untyped_storage() for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        result_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, Tensor):
                result_bytes.pop(leaf.untyped_storage().data_ptr(), None)
        self.outside_bytes = max(peak - sum(result_bytes.values()), self.outside_bytes)
        return results[0]

    def settle(self, budget_bytes: float) -> None:
        """Run within a budget from now on, and free the filters that other schedules of the graph have prepared."""
        self.budget_bytes = budget_bytes
        self.costed.filters.forget_others(self._with_kept_filters())

    def _keep_filters(self) -> None:
        self.costed.filters.prepare(self._with_kept_filters())

    def _with_kept_filters(self) -> Iterator[tuple[Convolution, Algorithm]]:
        convolutions = convolutions_of(self.operators)
        for index, algorithm in self.algorithms.items():
            if algorithm is not None and index in self.costed.kept:
                yield convolutions[index], algorithm

    def _most_torch_bytes(self, number: int) -> int:
        """Return the most that torch needs beside the result of an operator in a segment."""
        segment = self.plan.segments[number]
        return max((self._torch_bytes(index, number) for index in range(segment.start, segment.stop)), default=0)

    def _torch_bytes(self, index: int, number: int) -> int:
        operator, cut = self.operators[index], self.plan.segments[number].cut
        if self.algorithms.get(index) is not None:
            return 0
        costs = self.graph.operators[index].costs_of(cut)
        if operator.rows == 0:
            return costs.scratch_bytes
        rows = int(self.ranges[number][index].computed.max()) * cut.samples
        return costs.scratch_bytes + costs.scratch_row_bytes * rows

    def segment_bytes(self) -> list[int]:
        """Return the bytes in use while each segment runs: whole results, bands, kept rows, filters and scratch."""
        sizes = []
        for number, segment in enumerate(self.plan.segments):
            whole = sum(
                vertex.whole_bytes
                for index, vertex in enumerate(self.graph.operators[: segment.stop])
                if self.graph.last_use[index] >= (segment.start if index < segment.start else segment.stop)
            )
            saved = sum(overlap.saved_bytes for overlap in self.overlaps[number])
            sizes.append(whole + self.block_bytes[number] + self._most_torch_bytes(number) - saved)
        return sizes

    @property
    def needed_bytes(self) -> int:
        """The peak of activations and workspace, without parameters, arguments and results."""
        return self.arena_bytes + self.outside_bytes

    @cached_property
    def own_memory(self) -> frozenset[int]:
        """The addresses of the memory of all constants."""
        fields = (tree_leaves([*vars(operator).values()]) for operator in self.operators)
        constants = [leaf for leaf in chain(self.captured.results, *fields) if isinstance(leaf, Tensor)]
        return frozenset(constant.untyped_storage().data_ptr() for constant in constants)

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
        schedule = copy(self)
        schedule._reserve(self.budget_bytes)
        schedule.outside_bytes = max(schedule.outside_bytes, self.outside_bytes)
        return schedule if schedule.needed_bytes <= self.budget_bytes else self

    def _run(self, arguments: tuple[Any, ...]) -> Any:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._run(arguments)
        with BorrowedWorkspace(self.arena_bytes, self.captured.device) as arena:
            frame = Frame(self, flattened(arguments), arena)
            tensors = [leaf for leaf in frame.leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
            key = tuple([tensor.stride() for tensor in tensors])
            memories = self.memories.get(key, self.captured.memories)
            program = self._programs.get(key)
            if program is not None:
                program.run(frame)
            else:
                self._keep_filters()
                program = record(frame)
                program.makes_results = self._makes_all(memories)
                if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors):
                    self._programs[key] = program  # otherwise addresses do not tell arguments apart
            results = [frame[result.index] if isinstance(result, Ref) else result for result in self.captured.results]
            if not program.makes_results:
                results = unshared(results, memories, frame.leaves, arena, self.own_memory)
            template = self.captured.template
            return results[template] if isinstance(template, int) else tree_map(results.__getitem__, template)

    def _makes_all(self, memories: Mapping[int, ResultMemory]) -> bool:
        """Return whether each call makes all results as the caller gets them, in memory that nothing shares."""
        direct, made = self.captured.direct_results, set[int]()
        for number, result in enumerate(self.captured.results):
            memory = memories.get(number)
            if memory is None or memory.base is not None or memory.block is not None or not isinstance(result, Ref):
                return False
            if direct.get(result.index) != memory.stride or result.index in made:
                return False
            made.add(result.index)
        return True

    @torch.no_grad()
    def operator_times(self, arguments: tuple[Any, ...]) -> dict[int, float]:
        """Return the seconds of each operator in a call, by index, one after another."""
        with BorrowedWorkspace(self.arena_bytes, self.captured.device) as arena:
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
