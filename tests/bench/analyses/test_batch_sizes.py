"""Curves over batch sizes and their cliffs, from made-up measurements whose right answer is known."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from math import inf, isclose
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems.made_up_sweeps import MIB, curves, layer, measured_ms, powers, sweep, tuning
from support.snapshots import assert_as_stored

from mucudnn.bench.analyses.batch_report import cliffs_table, curves_table, explanation, sweep_record, sweep_rows
from mucudnn.bench.analyses.batch_sizes import require_sweepable, starving_below, sweep_batch_sizes
from mucudnn.bench.analyses.cliffs import Cliff, CliffKind, Curve
from mucudnn.bench.report.export import write_csv
from mucudnn.solver.reuse import solve_wr
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import Measurement

UP_TO = 64


def cliffs(measurements: list[Measurement], up_to: int, limit_bytes: int | None = None) -> list[Cliff]:
    """Those of torch's own curve."""
    return [c for c in curves(measurements, up_to, limit_bytes).cliffs if c.curve is Curve.TORCH]


def steep(at: int, factor: float, **others: float) -> list[Measurement]:
    """Torch takes 1 ms a sample, but at one size ``factor`` ms."""
    return powers("native", UP_TO, lambda n: n * factor if n == at else n, **others)


def test_a_slow_batch_is_a_cliff_and_its_cut_is_named() -> None:
    """No cut helps where the pieces are slower; one that leaves some of the cliff says so."""
    (cliff,) = cliffs(steep(64, 1.4), UP_TO)
    assert (cliff.kind, cliff.n, cliff.reference.n, cliff.removed) == (CliffKind.SLOWER, 64, 32, True)
    assert str(cliff) == "batch 64: 1.40× the time per sample of 32; 64 runs as native 32×2, 1.40×"
    partly = "3 runs as native 2 + native 1, 1.50×, still slower per sample than 2"
    for milliseconds, remedy in (((10, 2, 6), "no cut helps"), ((4, 2, 9), partly)):
        (cliff,) = cliffs([measured_ms("native", n, ms) for n, ms in enumerate(milliseconds, start=1)], 3)
        assert (cliff.removed, cliff.remedy) == (False, remedy)


def test_both_undivided_curves_have_cliffs_of_their_own() -> None:
    quick = powers("quick", UP_TO, lambda n: 0.5 * n * (2.0 if n == 32 else 1.0))
    found = curves([*steep(64, 1.4), *quick], UP_TO).cliffs
    assert [(cliff.curve, cliff.remedy) for cliff in found] == [
        (Curve.TORCH, "64 runs as quick 64, 2.80×"),
        (Curve.UNDIVIDED, "32 runs as quick 16×2, 2.00×"),
    ]


def test_a_cliff_is_more_than_the_noise() -> None:
    for factor, others, is_cliff in (
        (1.04, {"noise": 0.0}, False),
        (1.06, {"noise": 0.0}, True),
        (1.25, {"noise": 0.2}, False),
        (1.30, {"noise": 0.2}, True),
        (1.65, {"samples": 1}, False),
        (1.75, {"samples": 1}, True),
    ):
        assert bool(cliffs(steep(64, factor, **others), UP_TO)) == is_cliff


def test_a_single_sample_hides_a_cliff_but_not_the_steady_ones_beside_it() -> None:
    measurements = steep(64, 1.4)
    lucky = replace(measurements[2], step_s=0.0039, samples=1)
    (cliff,) = cliffs([*measurements[:2], lucky, *measurements[3:]], UP_TO)
    assert cliff.reference.n == 32


@given(
    setup=st.floats(0, 10),
    per_sample=st.floats(0.01, 10),
    noise=st.floats(0, 0.5),
    errors=st.lists(st.floats(-0.5, 0.5), min_size=5, max_size=5),
)
def test_smooth_costs_have_no_cliff_whatever_the_noise(
    setup: float, per_sample: float, noise: float, errors: list[float]
) -> None:
    jitter = iter(errors)
    measurements = powers("native", 16, lambda n: (setup + per_sample * n) * (1 + noise * next(jitter)), noise=noise)
    assert cliffs(measurements, 16) == []


def test_what_whole_runs_refute_is_said() -> None:
    slow = layer(steep(64, 1.4), UP_TO, chosen="native")
    assert {c.remedy for c in sweep(slow, up_to=UP_TO).problems[0].cliffs} == {
        "64 runs as native 32×2, 1.40× (whole runs do not confirm it)"
    }
    earlier = layer(steep(32, 1.4), UP_TO, chosen="native")
    assert not any(cliff.refuted for cliff in sweep(earlier, up_to=UP_TO).problems[0].cliffs)


def test_a_jump_in_workspace_is_a_cliff_and_the_cut_does_without() -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    measurements = [measured_ms("native", n, n + 1, n * MIB if n < 32 else 4 * n * MIB) for n in sizes]
    (cliff,) = cliffs(measurements, UP_TO)
    assert (cliff.kind, cliff.n, cliff.reference.n) == (CliffKind.MORE_WORKSPACE, 32, 16)
    assert cliff.remedy == "32 runs as native 16×2, 0.97×, 16 MiB"
    assert cliff.finding == "needs 128 MiB, 16 needs 16 MiB"


def test_workspace_that_grows_with_the_batch_or_by_little_is_no_cliff() -> None:
    assert not cliffs([measured_ms("native", n, n, n * MIB) for n in (1, 2, 4, 8)], 8)
    assert not cliffs([measured_ms("native", n, n, 7 * MIB if n == 8 else 0) for n in (1, 2, 4, 8)], 8)
    (cliff,) = cliffs([measured_ms("native", 1, 1), measured_ms("native", 2, 1, 8 * MIB)], 2)  # it pays for itself
    assert (cliff.kind, cliff.remedy) == (CliffKind.MORE_WORKSPACE, "no cut helps")


def test_16_does_not_fit_but_32_does() -> None:
    measurements = [measured_ms("native", n, n, 100 * MIB if n == 16 else 10 * MIB) for n in (8, 16, 32)]
    limit = 50 * MIB
    (cliff,) = cliffs(measurements, 32, limit)
    assert cliff.finding == "needs 100 MiB, does not fit; 8 fits"
    assert cliff.remedy == "16 runs as native 8×2, 1.00×, 10 MiB"
    (cliff,) = cliffs(measurements[1:], 32, limit)
    assert cliff.finding == "needs 100 MiB, does not fit; 32 fits"
    assert cliff.remedy == "no cut helps"


def test_what_does_not_fit_is_neither_run_nor_compared_with() -> None:
    measurements = [measured_ms("native", n, n) for n in (1, 2)] + [
        measured_ms("native", 4, 1, 100),
        measured_ms("big", 4, 3),
    ]
    result = curves(measurements, 4, limit_bytes=99)
    assert [cliff.kind for cliff in result.cliffs] == [CliffKind.DOES_NOT_FIT]
    undivided = result.at(Curve.UNDIVIDED, 4)
    assert undivided is not None
    assert (undivided.runs_as, undivided.fits) == ("big 4", True)


@st.composite
def problems(draw: st.DrawFn) -> list[Measurement]:
    """Torch's at 1, 2, 4 and 8, and some more; with setups and prepared bytes."""
    sizes = (1, 2, 4, 8)
    found = [measured_ms("native", n, draw(st.floats(0.1, 100)), draw(st.integers(0, 100))) for n in sizes]
    for name in ("one", "two"):
        setup_s, prepared_bytes = draw(st.floats(0, 0.01)), draw(st.integers(0, 50))
        for n in draw(st.sets(st.sampled_from(sizes))):
            step_ms, scratch_bytes = draw(st.floats(0.1, 100)), draw(st.integers(0, 100))
            found.append(measured_ms(name, n, step_ms, scratch_bytes, setup_s=setup_s, prepared_bytes=prepared_bytes))
    return found


@given(measurements=problems(), limit_bytes=st.none() | st.integers(100, 150))
def test_divided_is_the_best_configuration_and_never_slower_than_undivided(
    measurements: list[Measurement], limit_bytes: int | None
) -> None:
    result = curves(measurements, 8, limit_bytes)
    for n in range(1, 9):
        divided, best = result.at(Curve.DIVIDED, n), solve_wr(measurements, n, limit_bytes)
        assert divided is not None
        assert (divided.time_s, divided.runs_as) == (best.time_s, str(best))
        undivided = result.at(Curve.UNDIVIDED, n)
        assert undivided is None or not undivided.fits or divided.time_s <= undivided.time_s


@given(first=problems(), second=problems(), count=st.integers(1, 5))
def test_the_network_is_the_sum_of_its_rows(first: list[Measurement], second: list[Measurement], count: int) -> None:
    rows = (layer(first, 8, name="first"), layer(second, 8, name="second", count=count))
    result = sweep(*rows, up_to=8)
    one, other = result.problems
    for curve in Curve:
        assert list(result.network.points[curve]) == list(one.points[curve])
        for n, point in result.network.points[curve].items():
            a, b = one.points[curve][n], other.points[curve][n]
            assert isclose(point.time_s, a.time_s + count * b.time_s)
            assert point.workspace_bytes == max(a.workspace_bytes, b.workspace_bytes)


def test_a_cliff_of_the_network_says_how_much_of_it_is_cut() -> None:
    rows = (layer(steep(64, 2.0), UP_TO), layer(steep(64, 1.0), UP_TO, count=3))
    cliff = sweep(*rows, up_to=UP_TO).network.cliffs[0]
    assert cliff.remedy == "64 runs as 4 convolutions, 1 cut, 1.25×"


def test_each_curve_says_below_which_batch_the_device_starves() -> None:
    """Torch takes as long for 4 samples as for 1; within the limit the other algorithm computes no more than 2."""
    latency_bound = [measured_ms("native", n, 4) for n in (1, 2, 4)]
    quick = [measured_ms("quick", n, n, n * MIB) for n in (1, 2, 4)]
    result = sweep(layer([*latency_bound, *quick], 4), up_to=4, limit_bytes=2 * MIB)
    assert result.starving_below == {Curve.TORCH: 4, Curve.UNDIVIDED: 1, Curve.DIVIDED: 1}
    assert sweep_record(result)["starving_below"] == result.starving_below
    nowhere = sweep(layer([measured_ms("native", 1, 1, 2 * MIB)], 1), up_to=1, limit_bytes=MIB)
    assert nowhere.starving_below == {}


def test_settings_without_a_curve_and_interrupted_tunings_are_refused() -> None:
    for config, expected in (
        (Config(workspace_budget="1MiB"), "workspace budget is valid at one batch size only; give a workspace limit"),
        (Config(workspace_limit="headroom"), "headroom limit is valid at one batch size only"),
        (Config(policy="undivided"), "measures one batch size only, which is no curve; choose power-of-two or all"),
    ):
        with pytest.raises(InvalidInputError, match=expected):
            require_sweepable(config)
    with pytest.raises(InvalidInputError, match="only 1 of 3 problems are tuned"):
        sweep_batch_sizes(tuning(layer(steep(64, 1), UP_TO), wanted=3), UP_TO)


def test_the_tables_have_curves_cliffs_and_what_is_solved() -> None:
    """Torch is slow at four samples, and cutting helps; the other needs more memory there."""
    first = layer([measured_ms("native", n, n * (2 if n == 4 else 1)) for n in (1, 2, 4)], 4, name="first")
    other = layer(
        [measured_ms("native", 1, 1), measured_ms("quick", 2, 1, 3 * MIB), measured_ms("quick", 4, 2)], 4, count=3
    )
    result = sweep(first, other, up_to=4, limit_bytes=64 * MIB)
    tables = (curves_table(result, each, every_size=True) for each in result.distinct_curves)
    assert_as_stored("batch", *tables, cliffs_table(result), explanation(result))


def test_csv_and_json_have_every_point_and_every_cliff(tmp_path: Path) -> None:
    result = sweep(layer(steep(64, 1.4), UP_TO, name="first"), up_to=UP_TO)
    write_csv(tmp_path / "out.csv", sweep_rows(result))
    with (tmp_path / "out.csv").open(encoding="utf-8") as stream:
        lines = [line for line in csv.DictReader(stream) if line["layer"] == "first"]
    assert [line["origin"] for line in lines] == ["measured"] * 14 + ["solved"] * 64
    (cliff,) = (line["cliffs"] for line in lines if line["curve"] == "torch" and line["cliffs"])
    record = json.loads(json.dumps(sweep_record(result)))
    (problem,) = record["problems"]
    assert len(problem["divided"]) == 64
    assert problem["cliffs"][0]["in_words"] == cliff
    assert problem["torch"][-1]["time_per_sample_s"] == pytest.approx(1.4e-3)
    assert (record["up_to"], record["measured_sizes"]) == (64, [1, 2, 4, 8, 16, 32, 64])


def test_a_device_starves_below_the_batch_from_which_on_it_is_busy() -> None:
    for seconds, expected in (
        ({1: 10, 2: 10, 3: 10, 4: 10, 5: 10, 6: 12, 7: 14}, 4),  # 1..5 samples take the same time
        ({1: 1, 2: 2, 3: 3}, 1),
        ({1: 1, 2: 2, 3: 30, 4: 4}, 4),  # a dip
        ({8: 10, 1: 10, 4: 10, 2: 10}, 8),  # of the sizes that are known
        ({1: 1, 2: 2, 4: 40}, 5),  # above all of them
        ({1: inf, 2: 2, 4: 4}, 2),  # what cannot run
    ):
        assert starving_below(seconds) == expected
