"""Schedules: plans made ready to run, with every band resolved and every buffer placed in one arena."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mucudnn.graph.builder import Captured
from mucudnn.graph.capture import flattened
from mucudnn.graph.convolution import Convolution, keep_filters
from mucudnn.graph.operators import Band, Barrier, Moments, Operator
from mucudnn.graph.program import Call, Program, record
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.running.workspace import borrowed_workspace, workspace_of
from mucudnn.solver import bands
from mucudnn.solver.bands import Costs, Cut, Ranges, Segment
from mucudnn.solver.placement import Buffer, place
from mucudnn.solver.plans import Overlap, Overlaps, Plan


def solver_graph(
    captured: Captured, costs: Mapping[int, tuple[Costs, ...]], whole_costs: Mapping[int, tuple[Costs, ...]]
) -> bands.Graph:
    """Return a captured graph as the solver sees it. costs, whole_costs: of operators, by index."""
    operators, direct = captured.operators, captured.direct_results
    described = []
    for index, one in enumerate(operators):
        heights = [operators[source].shape[2] for source in one.sources]
        row_bytes = 0 if one.rows == 0 or isinstance(one, Moments) else row_bytes_of(one)
        described.append(
            bands.Operator(
                reaches=one.reaches(heights) if one.rows else (),
                whole=one.wholes,
                rows=one.rows,
                row_bytes=row_bytes,
                whole_bytes=0 if index in direct else whole_bytes_of(one, row_bytes),
                costs=costs[index],
                whole_costs=whole_costs.get(index, ()),
                align=one.align if isinstance(one, Convolution) else 1,
                is_result=index in captured.result_indices,
                aliases=one.aliases if isinstance(one, Barrier) else (),
            )
        )
    return bands.Graph(described, captured.samples)


def row_bytes_of(operator: Operator) -> int:
    _, channels, _, width = operator.shape
    return channels * width * operator.dtype.itemsize


def whole_bytes_of(operator: Operator, row_bytes: int) -> int:
    if isinstance(operator, Moments):
        return operator.shape[0] * operator.groups * 16
    if isinstance(operator, Barrier):
        return operator.nbytes
    return operator.shape[0] * operator.rows * row_bytes if operator.rows else 0


@dataclass(frozen=True, slots=True)
class Place:
    """Place in the arena of the rows of an operator's result, in channels_last, ``rows`` of them for ``samples``."""

    offset: int
    samples: int
    rows: int

    def view(self, arena: Tensor, operator: Operator) -> Tensor:
        _, channels, _, width = operator.shape
        size = self.samples * self.rows * channels * width * operator.dtype.itemsize
        flat = arena[self.offset : self.offset + size].view(operator.dtype)
        row = channels * width
        return flat.as_strided(
            (self.samples, channels, self.rows, width), (self.rows * row, 1, row, channels), flat.storage_offset()
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The buffers of a segment, by operator, in a block of ``size_bytes``; offsets are from its start."""

    size_bytes: int
    bands: Mapping[int, Place]
    kept: Mapping[int, Place]
    prepared: Mapping[int, int]
    scratch: Mapping[int, int]


class Schedule:
    """A plan for a captured graph, ready to run.

    arena_bytes: what the arena has, which is allocated once. ``run`` may be called by several threads.

    limit_bytes: buffers are placed by an integer program if the schedule would need more otherwise.
    """

    def __init__(self, captured: Captured, graph: bands.Graph, plan: Plan, limit_bytes: float = inf) -> None:
        self.captured, self.graph, self.plan = captured, graph, plan
        self.operators = captured.operators
        self.ranges = [dict(self._ranges(segment)) for segment in plan.segments]
        self.layouts = [self._layout(*given) for given in zip(plan.segments, self.ranges, strict=True)]
        self.overlaps = [self._overlaps(*given) for given in zip(plan.segments, self.ranges, strict=True)]
        self.outside_bytes = self._predicted_outside_bytes()
        self._place(limit_bytes - self.outside_bytes)
        self._programs: dict[Any, Program] = {}  # by number of threads, and strides of the arguments
        self._timed: Program | None = None

    def _ranges(self, segment: Segment) -> Iterator[tuple[int, Ranges]]:
        if not self.graph.operators[segment.start].is_barrier:
            yield from self.graph.ranges(segment.start, segment.stop, segment.cut)

    def _overlaps(self, segment: Segment, ranges: Mapping[int, Ranges]) -> list[Overlap]:
        """Return the results of a segment that are written over earlier ones."""
        found: list[Overlap] = []
        overlaps = Overlaps(self.graph, segment.stop, segment.cut)
        for index, of_rows in ranges.items():  # from the last
            found = overlaps.add(index, of_rows)
        return found

    def _is_whole(self, index: int, segment: Segment) -> bool:
        return self.graph.is_whole(index, segment.stop)

    def _layout(self, segment: Segment, ranges: Mapping[int, Ranges]) -> Layout:
        """Place the buffers of a segment: bands and scratch by lifetime, then what is kept."""
        graph, cut, start = self.graph, segment.cut, segment.start
        buffers: list[Buffer] = []
        keys: list[tuple[str, int]] = []
        rows: dict[tuple[str, int], int] = {}

        def add(kind: str, index: int, size: int, first: int, last: int, count: int = 0) -> None:
            buffers.append(Buffer(size, first, last))
            keys.append((kind, index))
            rows[kind, index] = count

        for index in sorted(ranges):
            one, of_rows = self.operators[index], ranges[index]
            row_bytes = graph.operators[index].row_bytes * cut.samples
            if not self._is_whole(index, segment):
                end = max((reader for reader, _ in graph.readers[index] if reader < segment.stop), default=index)
                add("band", index, of_rows.held * row_bytes, index - start, end - start, of_rows.held)
                if of_rows.kept:
                    add("kept", index, of_rows.kept * row_bytes, 0, segment.stop, of_rows.kept)
            if isinstance(one, Convolution):
                algorithm = one.algorithm(cut)
                add("prepared", index, one.prepared_bytes(algorithm), 0, segment.stop)
                calls = () if algorithm is None else self._calls(index, ranges, cut)
                stages = (one.stage(algorithm, *call) for call in calls if algorithm is not None)
                scratch = max((workspace.scratch_bytes for _, workspace in stages), default=0)
                add("scratch", index, scratch, index - start, index - start)
        offsets, size = place(buffers)
        placed = dict(zip(keys, offsets, strict=True))

        def places(kind: str) -> dict[int, Place]:
            found = {index: offset for (its, index), offset in placed.items() if its == kind}
            return {index: Place(offset, cut.samples, rows[kind, index]) for index, offset in found.items()}

        return Layout(
            size,
            places("band"),
            places("kept"),
            {index: offset for (kind, index), offset in placed.items() if kind == "prepared"},
            {index: offset for (kind, index), offset in placed.items() if kind == "scratch"},
        )

    def _calls(self, index: int, ranges: Mapping[int, Ranges], cut: Cut) -> set[tuple[int, int, int, int]]:
        """Return samples, rows read, rows written and padding above of the calls of our algorithm."""
        one, of_rows = self.operators[index], ranges[index]
        assert isinstance(one, Convolution)
        calls: set[tuple[int, int, int, int]] = set()
        for new, high in zip(of_rows.new.tolist(), of_rows.high.tolist(), strict=True):
            if high > new:
                first, last = self.read(index, 0, new, high, cut)
                band = Band((), (first,), {}, torch.empty(0), new, high, slice(0, cut.samples))
                calls.update((n, last - first, high - new, one.above(band)) for n in self._sizes(cut))
        return calls

    def _sizes(self, cut: Cut) -> set[int]:
        n = self.captured.samples
        return {min(cut.samples, n), n % cut.samples or cut.samples}

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
            if is_stored and self._is_whole(index, self.plan.segments[number]):
                end = segment_of.get(self.graph.last_use[index], last)
                indices.append(index)
                buffers.append(Buffer(described.whole_bytes, number, end))
        blocks = [Buffer(layout.size_bytes, number, number) for number, layout in enumerate(self.layouts)]
        numbers = {index: number for number, index in enumerate(indices)}
        overlaps = {
            (numbers[one.read], numbers[one.written]): one.distance_bytes
            for of_segment in self.overlaps
            for one in of_segment
        }
        offsets, self.arena_bytes = place([*buffers, *blocks], overlaps, limit_bytes)
        self.whole = {
            index: Place(offset, self.captured.samples, self.operators[index].rows)
            for index, offset in zip(indices, offsets, strict=False)
        }
        self.starts = offsets[len(buffers) :]

    def count(self, arguments: tuple[Any, ...]) -> None:
        """Run once, and raise ``outside_bytes`` to what torch's allocator counts, if it counts more than predicted."""
        workspace_of(self.arena_bytes, self.captured.device, True)
        self._keep_filters()  # which are not the call's
        if self.captured.device.type == "cuda":
            self.run(arguments)  # what libraries need in their first call only is not counted
        gc.collect()  # what is freed during the call counts against it
        found: list[Any] = []
        peak = peak_allocated_bytes(lambda: found.append(self.run(arguments)), self.captured.device.type)
        own = {one.untyped_storage().data_ptr(): one.nbytes for one in tree_leaves(found) if isinstance(one, Tensor)}
        for given in tree_leaves(arguments):
            if isinstance(given, Tensor):
                own.pop(given.untyped_storage().data_ptr(), None)
        self.outside_bytes = max(peak - sum(own.values()), self.outside_bytes)

    def _keep_filters(self) -> None:
        keep_filters((one, algorithm) for one, algorithm in self._algorithms() if algorithm is not None)

    def forget_other_filters(self) -> None:
        """Free the prepared filters that are kept for algorithms that this schedule does not run."""
        used: dict[int, set[str]] = {}
        for one, algorithm in self._algorithms():
            used.setdefault(id(one._kept), set()).update(() if algorithm is None else (algorithm.name,))
        for one, _ in self._algorithms():
            one.forget(except_for=used[id(one._kept)])

    def _algorithms(self) -> Iterator[tuple[Convolution, Algorithm | None]]:
        for segment in self.plan.segments:
            for one in self.operators[segment.start : segment.stop]:
                if isinstance(one, Convolution):
                    yield one, one.algorithm(segment.cut)

    def _predicted_outside_bytes(self) -> int:
        """Return the most bytes of barriers' results, and of what torch needs for a step, that are alive together."""
        most = 0
        for number, segment in enumerate(self.plan.segments):
            live = sum(
                one.whole_bytes
                for index, one in enumerate(self.graph.operators[: segment.stop])
                if self._is_outside(index) and self.graph.last_use[index] >= segment.start
            )
            extra = max((self._extra_bytes(index, number) for index in range(segment.start, segment.stop)), default=0)
            most = max(most, live + extra)
        return most

    def _is_outside(self, index: int) -> bool:
        return isinstance(self.operators[index], (Barrier, Moments))

    def _extra_bytes(self, index: int, number: int) -> int:
        one, cut = self.operators[index], self.plan.segments[number].cut
        if isinstance(one, Convolution) and one.algorithm(cut) is not None:
            return 0
        costs = self.graph.operators[index].costs_of(cut)
        if one.rows == 0:
            return costs.scratch_bytes
        rows = int(self.ranges[number][index].computed.max()) * cut.samples
        return costs.scratch_bytes + costs.scratch_row_bytes * rows

    @cached_property
    def segment_bytes(self) -> list[int]:
        """The bytes that are in use while each segment runs: whole results, bands, kept rows, filters and scratch."""
        found = []
        for number, segment in enumerate(self.plan.segments):
            whole = sum(
                one.whole_bytes
                for index, one in enumerate(self.graph.operators[: segment.stop])
                if self.graph.last_use[index] >= (segment.start if index < segment.start else segment.stop)
            )
            extra = (self._extra_bytes(index, number) for index in range(segment.start, segment.stop))
            saved = sum(one.saved_bytes for one in self.overlaps[number])
            found.append(whole + self.layouts[number].size_bytes + max(extra, default=0) - saved)
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

    @torch.no_grad()
    def run(self, arguments: tuple[Any, ...]) -> Any:
        """Return the model's output for arguments of the captured shapes."""
        with borrowed_workspace(self.arena_bytes, self.captured.device) as arena:
            call = Call(self, flattened(arguments), arena)
            tensors = [one for one in call.leaves if isinstance(one, Tensor) and one.layout is torch.strided]
            key = torch.get_num_threads(), *(one.stride() for one in tensors)
            program = self._programs.get(key)
            if program is not None:
                program.run(call)
                return call.results()
            self._keep_filters()
            if len({one.untyped_storage().data_ptr() for one in tensors}) < len(tensors):
                record(call)  # whose addresses do not tell arguments apart that share memory, as later ones may not
            else:
                self._programs[key] = record(call)
            return call.results()

    @torch.no_grad()
    def operator_times(self, arguments: tuple[Any, ...]) -> dict[int, float]:
        """Return the seconds of each operator in a call, by index, one after another."""
        with borrowed_workspace(self.arena_bytes, self.captured.device) as arena:
            call = Call(self, flattened(arguments), arena)
            if self._timed is None:
                self._keep_filters()
                self._timed = record(call, joins=False)
                call = Call(self, call.leaves, arena)
            return self._timed.timed(call)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out programs, which refer to addresses in this process."""
        state = self.__dict__ | {"_programs": {}, "_timed": None}
        state.pop("own_memory", None)
        return state
