"""Cutting graphs into segments and bands: the exact front against brute force, and rows against their definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from support.effort import how_many

from mucudnn.solver.bands import Costs, Cut, Graph, Ranges, Reach, Segment, Vertex
from mucudnn.solver.placement import Buffer, aligned, place
from mucudnn.solver.plans import Overlap, Overlaps, closer, cuts, plan_within, plans, segment_costs
from mucudnn.solver.recompute import in_order, orders_within


def window(source: int, rows: int, height: int, stride: int, padding: int, extent: int) -> Reach:
    start = np.arange(rows) * stride - padding
    first = np.clip(start, 0, height - 1)
    return Reach(source, first, np.clip(start + extent, first + 1, height))


def random_graph(random: Random, operators: int) -> Graph:
    """Return a graph of windows on one or two earlier results, and a few barriers."""
    made = [Vertex((), (), 0, 0, 0, (Costs(),))]  # the input
    heights = [random.randint(1, 12)]
    for index in range(1, operators):
        source = index - 1 if random.random() < 0.7 else random.randrange(index)
        is_result = random.random() < 0.2 or index == operators - 1
        costs = tuple(
            Costs(*(random.random() for _ in range(3)), *(random.randint(0, 9) for _ in range(3)))
            for _ in range(random.randint(1, 2))
        )
        if random.random() < 0.15:
            made.append(Vertex((), (source,), 0, 0, random.randint(1, 50), costs, is_result=is_result))
            heights.append(heights[source])
            continue
        extent, stride = random.randint(1, 3), random.randint(1, 2)
        padding, height = random.randint(0, extent // 2), heights[source]
        rows = max((height + 2 * padding - extent) // stride + 1, 1)
        reaches = [window(source, rows, height, stride, padding, extent)]
        same = [i for i in range(index) if heights[i] == rows and i != source]
        if same and random.random() < 0.4:
            reaches.append(window(random.choice(same), rows, rows, 1, 0, 1))
        row_bytes = random.randint(1, 9)
        align = random.choice([1, 1, 2, 3])
        made.append(
            Vertex(tuple(reaches), (), rows, row_bytes, rows * row_bytes * 2, costs, align=align, is_result=is_result)
        )
        heights.append(rows)
    return Graph(made, samples=2)


def simulated(graph: Graph, start: int, stop: int, cut: Cut) -> tuple[int, float]:
    """Run a segment call by call; return the most bytes of its own buffers at a time, less overlaps, and the seconds.

    A buffer is as large as the largest band needs it. Filters and kept rows last as long as the segment.
    """
    if (barrier := graph.operators[start]).is_barrier:  # which has one variant
        return barrier.whole_bytes + barrier.costs[0].scratch_bytes, barrier.costs[0].call_s
    costs = {index: graph.operators[index].costs_of(cut) for index in range(start, stop)}
    overlaps, rows, saved = Overlaps(graph, stop, cut), {}, 0
    for index, ranges in graph.ranges(start, stop, cut):
        saved = sum(one.saved_bytes for one in overlaps.add(index, ranges))
        rows[index] = list(zip(*(of.tolist() for of in (ranges.low, ranges.new, ranges.high)), strict=True))
    lasting, held, until = sum(costs[index].prepared_bytes for index in rows), {}, {}
    for index, of_bands in rows.items():
        operator = graph.operators[index]
        held[index] = max(high - low for low, _, high in of_bands) * cut.samples * operator.row_bytes
        until[index] = max((reader for reader, _ in graph.readers[index] if reader < stop), default=index)
        if operator.is_result or any(reader >= stop for reader in reading(graph, index)):
            lasting, held[index] = lasting + operator.whole_bytes, 0
        elif cut.keeps:
            kept = [new - low for low, new, high in of_bands if high > low]
            lasting += max(kept, default=0) * cut.samples * operator.row_bytes
    time_s, most, prepared = 0.0, 0, set[int]()
    for sample in range(0, graph.samples, cut.samples):
        samples = min(cut.samples, graph.samples - sample)
        for band in range(cut.bands):
            for index in range(start, stop):
                _, new, high = rows[index][band]
                alive = sum(size for other, size in held.items() if other <= index <= until[other])
                scratch = costs[index].scratch_bytes + costs[index].scratch_row_bytes * (high - new) * samples
                most = max(most, alive + scratch)
                if high > new:
                    time_s += costs[index].setup_s * (index not in prepared)
                    time_s += costs[index].call_s + costs[index].row_s * (high - new) * samples
                    prepared.add(index)
    return lasting + most - saved, time_s


def reading(graph: Graph, index: int) -> set[int]:
    """Return the operators that read a result, or a view of it."""
    views = {other for other, one in enumerate(graph.operators) if index in one.aliases}
    return {reader for reader, _ in graph.readers[index]}.union(*(reading(graph, view) for view in views))


def live_bytes(graph: Graph, start: int) -> int:
    """Return the bytes of the whole results that are read from operator ``start`` on."""
    earlier = enumerate(graph.operators[:start])
    return sum(one.whole_bytes for i, one in earlier if one.is_result or max(reading(graph, i), default=0) >= start)


def every_cut(graph: Graph, stop: int) -> list[Cut]:
    return [replace(cut, variant=variant) for cut in cuts(graph, stop) for variant in range(graph.variants)]


def test_costs_of_segments_are_those_of_their_calls() -> None:
    """The first sample, row or call of a segment that a formula counts twice, or not at all, makes a difference."""
    for seed in range(how_many(25, 400)):
        graph = random_graph(Random(seed), 6)
        for stop in range(1, len(graph) + 1):
            for cut in cuts(graph, stop):
                for start, of_variant, needed, time_s in segment_costs(graph, stop, cut):
                    expected = simulated(graph, start, stop, of_variant)
                    assert (needed, time_s) == (expected[0], pytest.approx(expected[1])), f"seed {seed}, {of_variant}"


def every_plan(graph: Graph) -> set[tuple[int, float]]:
    """Return memory and time of every plan, by trying all segments and cuts."""
    found = set()
    for ends in product([False, True], repeat=len(graph) - 1):
        stops = [index for index, is_end in enumerate(ends, 1) if is_end] + [len(graph)]
        segments = list(zip([0, *stops[:-1]], stops, strict=True))
        if any(start not in graph.starts(stop) for start, stop in segments):
            continue
        options = []
        for start, stop in segments:
            live = live_bytes(graph, start)
            costs = (simulated(graph, start, stop, cut) for cut in every_cut(graph, stop))
            options.append({(live + needed, time_s) for needed, time_s in costs})
        for chosen in product(*options):
            found.add((max(needed for needed, _ in chosen), sum(time_s for _, time_s in chosen)))
    return found


def test_front_is_that_of_all_plans() -> None:
    for seed in range(how_many(25, 400)):
        graph = random_graph(Random(seed), 5)
        every = every_plan(graph)
        best = {}
        for memory, time_s in every:
            best[memory] = min(time_s, best.get(memory, time_s))
        front, fastest = [], float("inf")
        for memory in sorted(best):
            if best[memory] < fastest - 1e-9:
                front.append((memory, best[memory]))
                fastest = best[memory]
        found = [(plan.memory_bytes, plan.time_s) for plan in plans(graph)]
        smallest = {memory: min(t for m, t in found if m <= memory) for memory, _ in front}
        assert found[0][0] == front[0][0], f"seed {seed}"
        for memory, time_s in front:
            assert smallest[memory] == pytest.approx(time_s), f"seed {seed}"


def test_bands_have_the_rows_that_their_readers_need() -> None:
    """Every row is computed before it is read, and no row is lost that a later band reads."""
    for seed in range(how_many(50, 1000)):
        random = Random(seed)
        graph = random_graph(random, 8)
        stop = len(graph)
        if graph.operators[stop - 1].is_barrier:
            continue
        start = random.choice(graph.starts(stop))
        for cut in cuts(graph, stop):
            ranges = dict(graph.ranges(start, stop, cut))
            for index, rows in ranges.items():
                one = graph.operators[index]
                held: set[int] = set()
                for k in range(cut.bands):
                    low, new, high = int(rows.low[k]), int(rows.new[k]), int(rows.high[k])
                    assert set(range(low, new)) <= held, f"seed {seed}: rows are kept that were not there"
                    held = set(range(low, high))
                    assert new % one.align == 0 or new == high
                    for reader, reach in graph.readers[index]:
                        if reader < stop and reach is not None:
                            for row in range(int(ranges[reader].new[k]), int(ranges[reader].high[k])):
                                needed = set(range(int(reach.first[row]), int(reach.last[row])))
                                there = set(range(high)) if graph.is_whole(index, stop) else held
                                assert needed <= there, f"seed {seed}, {cut}"
                if graph.is_whole(index, stop):
                    assert rows.new[0] == 0
                    assert rows.high[-1] == one.rows


def test_results_are_written_over_rows_that_were_read() -> None:
    """What is written never lies where the same operator, or one that runs later, still reads."""
    overlapping = 0
    for seed in range(how_many(100, 2000)):
        random = Random(seed)
        graph = random_graph(random, 8)
        stop = random.randint(1, len(graph))
        if graph.operators[stop - 1].is_barrier:
            continue
        for cut in cuts(graph, stop):
            overlaps = Overlaps(graph, stop, cut)
            ranges = {}
            for index, rows in graph.ranges(graph.starts(stop)[-1], stop, cut):
                ranges[index] = rows
                found = overlaps.add(index, rows)
                taken = [number for one in found for number in (one.read, one.written)]
                assert len(set(taken)) == len(taken), f"seed {seed}"
                for one in found:
                    assert one.read < index <= one.written
                    assert graph.last_use[one.read] < stop
                    check_overlap(graph, one, ranges, cut, f"seed {seed}, {cut}, {one}")
                    overlapping += 1
    assert overlapping


def check_overlap(graph: Graph, one: Overlap, ranges: dict[int, Ranges], cut: Cut, what: str) -> None:
    read, written = graph.operators[one.read], graph.operators[one.written]
    both = max(written.whole_bytes, one.distance_bytes + read.whole_bytes)
    assert one.saved_bytes == read.whole_bytes + written.whole_bytes - both > 0, what
    end, first_byte = 0, one.distance_bytes  # of what is written so far; of the tensor that is read
    for sample in range(0, graph.samples, cut.samples):
        after = min(sample + cut.samples, graph.samples)
        for k in range(cut.bands):
            for index in sorted(ranges):
                of_sample = after - 1 if cut.bands == 1 else sample
                if index == one.written and ranges[index].computed[k]:
                    end = (of_sample * written.rows + int(ranges[index].high[k])) * written.row_bytes
                for reader, reach in graph.readers[one.read]:
                    if reader == index and reach is not None and ranges[reader].computed[k]:
                        row = 0 if cut.bands == 1 else int(reach.first[int(ranges[reader].new[k])])
                        assert end <= first_byte + (sample * read.rows + row) * read.row_bytes, what


def test_results_move_closer_over_those_that_they_overwrite() -> None:
    """Within the plan's memory no cut saves more of two results that overlap, and the time is that of the cuts."""
    differ = 0
    for seed in range(how_many(25, 400)):
        graph = random_graph(Random(seed), 6)
        for plan in plans(graph)[:2]:
            made, time_s = closer(graph, plan), 0.0
            for before, after in zip(plan.segments, made.segments, strict=True):
                assert (before.start, before.stop) == (after.start, after.stop)
                live = live_bytes(graph, after.start)
                costs = {cut: simulated(graph, after.start, after.stop, cut) for cut in every_cut(graph, after.stop)}
                allowed = [cut for cut, (needed, _) in costs.items() if live + needed <= plan.memory_bytes]
                assert after.cut in allowed, f"seed {seed}"
                time_s += costs[after.cut][1]
                most = max(saved_bytes(graph, replace(after, cut=cut)) for cut in allowed)
                if saved_bytes(graph, before):
                    assert saved_bytes(graph, after) == most, f"seed {seed}"
                    differ += saved_bytes(graph, before) < most
            assert made.time_s == pytest.approx(time_s), f"seed {seed}"
    assert differ


def saved_bytes(graph: Graph, one: Segment) -> int:
    overlaps, found = Overlaps(graph, one.stop, one.cut), list[Overlap]()
    if not graph.operators[one.start].is_barrier:
        for index, rows in graph.ranges(one.start, one.stop, one.cut):
            found = overlaps.add(index, rows)
    return sum(overlap.saved_bytes for overlap in found)


def test_placed_buffers_do_not_overlap() -> None:
    for seed in range(how_many(50, 500)):
        random = Random(seed)
        buffers = []
        for _ in range(random.randint(1, 12)):
            start = random.randint(0, 6)
            buffers.append(Buffer(random.randint(0, 3000), start, start + random.randint(0, 4)))
        meet = [(i, j) for i, one in enumerate(buffers) for j, other in enumerate(buffers) if one.end == other.start]
        behind = {pair: random.randint(0, 1000) for pair in meet if pair[0] != pair[1] and random.random() < 0.5}
        behind = {pair: distance for pair, distance in behind.items() if pair[::-1] not in behind}
        alive = max(sum(aligned(b.size_bytes) for b in buffers if b.start <= t <= b.end) for t in range(12))
        sizes = []
        for limit in (float("inf"), 0) if seed % 5 == 0 else (float("inf"),):
            offsets, size = place(buffers, behind, limit)
            sizes.append(size)
            for i, one in enumerate(buffers):
                assert offsets[i] % 256 == 0
                assert 0 <= offsets[i] <= offsets[i] + one.size_bytes <= size
                for j, other in enumerate(buffers):
                    together = one.start <= other.end and other.start <= one.end and one.size_bytes and other.size_bytes
                    apart = offsets[i] + one.size_bytes <= offsets[j] or offsets[j] + other.size_bytes <= offsets[i]
                    apart |= (i, j) in behind and offsets[i] >= offsets[j] + behind[i, j]
                    apart |= (j, i) in behind and offsets[j] >= offsets[i] + behind[j, i]
                    assert i == j or apart or not together, f"seed {seed}"
            assert alive <= size or behind
        assert sizes[-1] <= sizes[0]


def test_an_integer_program_places_what_the_greedy_order_cannot() -> None:
    sizes = (768, 3, 4), (768, 3, 3), (1024, 0, 1), (768, 1, 3), (512, 0, 1), (768, 2, 4)
    buffers = [Buffer(*one) for one in sizes]
    assert place(buffers)[1] == 3328
    assert place(buffers, None, 3328)[1] == 3328  # which is enough
    assert place(buffers, None, 3200)[1] == 3072 == 4 * 768  # alive together in step 3
    sizes = (1536, 0, 1), (1536, 1, 2), (768, 2, 3), (256, 0, 3), (512, 2, 2), (1024, 3, 3)
    chain = {(0, 1): 0, (1, 2): 0}  # each may lie where the one before lies
    assert place([Buffer(*one) for one in sizes], chain, 2304)[1] == 2304


def test_a_result_is_recomputed_where_the_budget_asks_for_it() -> None:
    """A large tensor of a small input, which two windows read, far from each other, and a barrier between them."""
    made = [
        Vertex((), (), 0, 0, 0, (Costs(),)),
        Vertex((window(0, 64, 64, 1, 0, 1),), (), 64, 100, 6400, (Costs(row_s=1.0),)),
        Vertex((window(1, 64, 64, 1, 1, 3),), (), 64, 50, 3200, (Costs(row_s=1.0),)),
        Vertex((), (2,), 0, 0, 0, (Costs(call_s=1.0),)),
        Vertex((window(2, 64, 64, 1, 1, 3), window(1, 64, 64, 1, 0, 1)), (3,), 64, 50, 0, (Costs(row_s=1.0),)),
    ]
    graph = Graph([*made[:-1], replace(made[-1], is_result=True)], 1)
    assert plans(graph)[0].memory_bytes > 9000
    (order,) = orders_within(graph, 5000, 0.0)
    assert order == (0, 1, 2, 3, 1, 4)
    again = in_order(graph, order)
    assert plans(again)[0].memory_bytes < 5000
    assert plan_within(again, 5000)[0].time_s == pytest.approx(4 * 64 + 1)
    assert list(orders_within(graph, 5000, 1e9)) == [order]  # memory comes before time
    assert not list(orders_within(graph, 20_000, 1e9))


def test_the_plan_within_a_budget_is_of_the_front() -> None:
    for seed in range(how_many(25, 400)):
        graph = random_graph(Random(seed), 6)
        for plan in plans(graph):
            found, needed = plan_within(graph, plan.memory_bytes)
            assert max(needed) == found.memory_bytes <= plan.memory_bytes, f"seed {seed}"
            assert found.time_s == pytest.approx(plan.time_s), f"seed {seed}"
        least = plans(graph)[0].memory_bytes
        assert plan_within(graph, least - 1)[0].memory_bytes >= least


def test_a_chain_needs_few_rows() -> None:
    """17 windows of 3 rows: each result keeps 2 rows, and the first band reads 16 more, since all halos begin there."""
    height = 256
    chain = [Vertex((), (), 0, 0, 0, (Costs(),))]
    chain += [
        Vertex(
            (window(i, height, height, 1, 1, 3),), (), height, 10, height * 10, (Costs(row_s=1.0),), is_result=i == 16
        )
        for i in range(17)
    ]
    chain[-1] = Vertex(chain[-1].reaches, (), height, 10, 0, (Costs(row_s=1.0),), is_result=True)
    front = plans(Graph(chain, 1))
    assert front[0].memory_bytes <= 17 * 2 * 10 + 2 * (16 + 3) * 10 < 2 * height * 10
    assert front[-1].time_s == pytest.approx(17 * height)
