"""Order of the problems, in which every kind of layer comes early: a run that ends before the end has met all kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from mucudnn.bench.contests.bounds import kind_of_layer
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.words.problem import ConvProblem, Operation

Wanted = tuple[Layer, ConvProblem]


def in_order(table: LayerTable, operations: Sequence[Operation]) -> list[Wanted]:
    """Return the problems of a table: one of each kind of layer in turn, those with least work first.

    Each kind begins with another operation, so that a few problems are of several operations, too.
    """
    groups: dict[str, dict[Operation, list[Wanted]]] = {}
    for layer, problem in table.problems(operations):
        groups.setdefault(kind_of_layer(problem), {}).setdefault(problem.operation, []).append((layer, problem))
    every = [
        sorted(group.get(operations[(index + turn) % len(operations)], ()), key=_work)
        for turn in range(len(operations))
        for index, group in enumerate(groups.values())
    ]
    return list(_in_turns(every))


def _work(wanted: Wanted) -> int:
    layer, problem = wanted
    return problem.flops(layer.batch_size)


def _in_turns(groups: Sequence[Sequence[Wanted]]) -> Iterator[Wanted]:
    every = chain.from_iterable(zip_longest(*groups))
    return (one for one in every if one is not None)
