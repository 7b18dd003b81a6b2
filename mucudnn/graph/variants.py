"""The algorithms of each variant of a graph's convolutions, chosen among the candidates, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mucudnn.graph.candidates import Choice, Choices, Place, band_rows, fastest_and_smallest
from mucudnn.graph.costed import CostedGraph, solver_graph
from mucudnn.graph.costs import CALL_S, convolution_costs, every_cost, operator_costs
from mucudnn.graph.operators.convolution import Convolution, convolutions_of
from mucudnn.graph.operators.operator import Captured
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.measuring.timings import Timings
from mucudnn.solver.bands import Costs

_SHARES = 1.0, 0.35, 0.0  # of the fastest algorithm's prepared filter, which the algorithms of each variant may have
_TORCHS_LEAD = 0.9  # of the time of ours, below which torch's own runs
_TORCHS_LEAD_BY_SAMPLES = 0.5  # where it will run sample by sample


def costed_graph(
    captured: Captured, choices: Choices, kept: frozenset[int], timings: Timings, *, batch_invariant: bool = False
) -> CostedGraph:
    """Return the graph with the costs of its operators, and the algorithms of each variant of its convolutions.

    batch_invariant: whether batches run by the algorithms of this graph, torch's own sample by sample.
    """
    torchs_lead = _TORCHS_LEAD_BY_SAMPLES if batch_invariant else _TORCHS_LEAD
    whole: dict[int, tuple[Algorithm | None, ...]] = {}
    bands: dict[int, tuple[Algorithm | None, ...]] = {}
    whole_costs: dict[int, tuple[Costs, ...]] = {}
    band_costs: dict[int, tuple[Costs, ...]] = {}
    offered: dict[int, tuple[Algorithm, ...]] = {}
    known: dict[str, Costs] = {}
    for index, convolution in convolutions_of(captured.operators).items():
        torchs, is_kept = operator_costs(captured, index, timings, known), index in kept
        in_bands = partial(_band_costs, captured, index, timings)
        fastest = fastest_and_smallest(choices.get(index, ()), is_kept=is_kept)
        torchs_in_place = (choice.seconds for choice in choices.get(index, ()) if choice.algorithm is None)
        torchs_s = next(torchs_in_place, torchs.seconds(captured.samples * convolution.rows))
        variants = _variants(convolution, fastest, in_bands, torchs, torchs_s, torchs_lead, is_kept=is_kept)
        whole[index] = tuple(None if choice is None else choice.algorithm for choice, _ in variants)
        bands[index] = tuple(None if choice is None else choice.algorithm for _, choice in variants)
        with_buffers = partial(_with_buffers, convolution, is_kept=is_kept)
        whole_costs[index] = tuple(
            torchs
            if choice is None
            else with_buffers(choice, convolution.rows, _whole_costs(convolution, choice, in_bands))
            for choice, _ in variants
        )
        band_costs[index] = tuple(
            torchs if choice is None else with_buffers(choice, band_rows(convolution), in_bands(choice))
            for _, choice in variants
        )
        offered[index] = tuple(choice.algorithm for choice in fastest if choice.algorithm is not None)
    graph = solver_graph(captured, every_cost(captured, timings, band_costs), whole_costs)
    return CostedGraph(captured, graph, whole, bands, offered, kept)


def _band_costs(captured: Captured, index: int, timings: Timings, choice: Choice) -> Costs:
    """Return the costs of bands by an algorithm of ours; those of all rows, if there is no time to measure."""
    assert choice.algorithm is not None
    costs = convolution_costs(captured, index, choice.algorithm, timings)
    return costs or Costs(call_s=CALL_S, row_s=choice.seconds / choice.rows)


def _whole_costs(convolution: Convolution, choice: Choice, in_bands: Callable[[Choice], Costs]) -> Costs:
    row_s = choice.seconds / choice.rows
    if len(convolution.sources) > 1 and choice.place is not Place.GRAPH:
        row_s = max(row_s, in_bands(choice).row_s)  # it was tuned without the addition
    return Costs(row_s=row_s)


def _with_buffers(convolution: Convolution, choice: Choice, rows: int, costs: Costs, *, is_kept: bool) -> Costs:
    assert choice.algorithm is not None
    scratch = convolution.scratch_bytes(choice.algorithm, rows)
    if is_kept:
        return replace(costs, scratch_bytes=scratch)
    return replace(costs, setup_s=choice.setup_s, scratch_bytes=scratch, prepared_bytes=choice.prepared_bytes)


def _variants(
    convolution: Convolution,
    fastest: Sequence[Choice],
    in_bands: Callable[[Choice], Costs],
    torchs: Costs,
    torchs_s: float,
    torchs_lead: float,
    *,
    is_kept: bool,
) -> list[tuple[Choice | None, Choice | None]]:
    """Return what computes all rows, and bands: the fastest, and ever smaller prepared filters; None for torch's own.

    fastest: of our algorithms.
    in_bands: returns their costs in bands.
    torchs: the costs of torch's own by itself.
    torchs_s: its seconds for all rows.
    torchs_lead: as for ``_best``.
    """
    rows = band_rows(convolution)
    whole_s = {choice: choice.call_s(is_kept=is_kept) for choice in fastest}
    band_s = whole_s
    if convolution.rows > 1:
        by_rows = {choice: replace(choice, seconds=in_bands(choice).seconds(rows)) for choice in fastest}
        band_s = {choice: by_rows[choice].call_s(is_kept=is_kept) for choice in fastest}
    are_bands = any(choice.place is Place.BAND for choice in fastest)
    variants: list[tuple[Choice | None, Choice | None]] = []
    for share in _SHARES:
        whole = None if are_bands else _best(whole_s, torchs_s, torchs_lead, share)
        variants.append((whole, _best(band_s, torchs.seconds(rows), torchs_lead, share)))
    if convolution.rows == convolution.problem.extent[0] == 1 and not is_kept:
        variants.append((None, None))  # the filters of a linear layer are as large as prepared ones
    return list(dict.fromkeys(variants))


def _best(seconds: Mapping[Choice, float], torchs_s: float, torchs_lead: float, share: float) -> Choice | None:
    """Return the fastest of our algorithms; None if torch's own is faster, or there is none of ours.

    seconds: of our algorithms.
    torchs_s: seconds that torch's own takes for the same rows.
    torchs_lead: share of the time of ours below which torch's own runs.
    share: the largest prepared filter, as a share of the fastest algorithm's; below 1 torch's own is not considered. If
        all are larger, the smallest.
    """
    if not seconds:
        return None
    best = min(seconds, key=seconds.__getitem__)
    if share == 1:
        return None if torchs_s < torchs_lead * seconds[best] else best
    smaller = [choice for choice in seconds if choice.prepared_bytes <= share * best.prepared_bytes]
    smallest = min(seconds, key=lambda choice: (choice.prepared_bytes + choice.scratch_bytes, seconds[choice]))
    return min(smaller, key=seconds.__getitem__, default=smallest)
