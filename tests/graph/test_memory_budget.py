"""``Config(memory_budget=...)``: within the bytes, the model's values, and what happens where that is not possible."""

from __future__ import annotations

import copy
import gc
import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.sources.networks.large_images import EDSR, DnCNN, SegmentingUNet
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError, InvalidInputError
from mucudnn.core.records import Comparison
from mucudnn.core.terminal import silent
from mucudnn.graph import candidates, fitting
from mucudnn.graph.candidates import with_kept_filters
from mucudnn.graph.capture import NotCapturedError
from mucudnn.graph.memory_budget import fit_in_memory
from mucudnn.graph.model import BandedModel
from mucudnn.graph.operators.convolution import Filters, convolutions_of
from mucudnn.graph.schedule import Schedule
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.measuring.timings import Timings
from mucudnn.solver.plans import Plan

MIB = 2**20


@pytest.fixture
def quick(tmp_path: Path) -> dict[str, Any]:
    if reason := loaded_build().why_not_compiled:
        pytest.skip(f"only compiled algorithms run bands in few bytes: {reason}")
    return {
        "database": tmp_path / "db.sqlite",
        "algorithms": ("implicit-gemm", "pointwise", "winograd-4x4", "frames-implicit-gemm"),
    }


def peak_of(model: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """Return the peak bytes of a call, beside its result."""
    mucudnn.release_workspaces()
    gc.collect()
    found: list[Tensor] = []
    with torch.no_grad():
        peak = peak_allocated_bytes(lambda: found.append(model(x)))
    return peak - found[0].nbytes, found[0]


class Clip(nn.Module):
    """A block of a causal decoder of clips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(4, 16, 3), nn.Conv3d(16, 3, 3)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.norm(self.first(nn.functional.pad(x, (1, 1, 1, 1, 2, 0)))))
        return self.last(nn.functional.pad(nn.functional.interpolate(x, scale_factor=(1, 2, 2)), (1, 1, 1, 1, 2, 0)))


def unet() -> nn.Module:
    return SegmentingUNet(widths=(16, 32))


@pytest.mark.parametrize(
    ("model", "shape", "budget"),
    [
        (DnCNN(4, 16), (1, 1, 48, 40), "160KiB"),
        (EDSR(1, 8), (2, 3, 20, 24), "160KiB"),
        (unet(), (1, 3, 32, 40), "250KiB"),
        (Clip(), (1, 4, 8, 12, 10), "320KiB"),
    ],
    ids=["dncnn", "edsr", "unet", "clip"],
)
def test_calls_stay_within_the_budget(
    model: nn.Module, shape: tuple[int, ...], budget: str, quick: dict[str, Any]
) -> None:
    x = torch.randn(shape)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval().double()(x.double())
    assert peak_of(model.eval(), x)[0] > Config(memory_budget=budget).memory_budget_bytes
    fitted = mucudnn.optimize(model, x, Config(memory_budget=budget, **quick), progress=False)
    assert isinstance(fitted, BandedModel)
    peak, y = peak_of(fitted, x)
    assert peak <= Config(memory_budget=budget).memory_budget_bytes
    assert torch.linalg.vector_norm(y - expected) < 1e-5 * torch.linalg.vector_norm(expected)
    found = mucudnn.report(fitted)
    assert " within a budget of " in str(found)
    graph = found.memory[0]
    told = {line.removeprefix("  in place   ") for line in found.details().splitlines() if "  in place " in line}
    runs = {"PyTorch" if one is None else one.name for one in graph.schedule.algorithms.values()}
    by_graph = {name for line in told for name in line.removeprefix("the graph runs ").split(" and ")}
    assert by_graph == ({"the model runs as it is, which is faster"} if graph.runs_torchs else runs)
    assert {*found.to_frame()["layer"]} == {*found.memory[0].tuned}


def test_the_smallest_budget_is_named_before_anything_is_measured_and_then_reached(quick: dict[str, Any]) -> None:
    """It is the same whatever is known, and whatever the timings: here every schedule that they choose fails."""
    nothing = mock.patch.object(fitting, "_contenders", return_value=[])
    for model, x, options, contenders in (
        (DnCNN(3, 16), torch.randn(1, 1, 24, 20), {"cache_budget": "none"}, (nullcontext(), nothing)),
        (UpsamplingBlock(), torch.randn(1, 8, 8, 8), {}, (nothing,)),
        (Clip(), torch.randn(1, 4, 3, 24, 6), {}, (nullcontext(),)),  # which needs less in bands of rows
    ):
        config, named = Config(**quick, **options), list[int]()
        for budget in (1000, 10_000)[: len(contenders)]:
            with (
                pytest.raises(InfeasibleError, match=r"the memory budget is \S*B .*needs at least") as caught,
                mock.patch.object(fitting, "tuned_problems", side_effect=AssertionError("it is measured")),
            ):
                mucudnn.optimize(model.eval(), x, replace(config, memory_budget=budget), progress=False)
            named.append(caught.value.smallest_feasible_bytes)
        (least,) = {*named}
        with torch.no_grad():
            expected = copy.deepcopy(model).double()(x.double())
        for chosen_by_timings in contenders:
            with chosen_by_timings:
                fitted = mucudnn.optimize(model, x, replace(config, memory_budget=least), progress=False)
            with torch.no_grad():
                fitted(x)
            peak, y = peak_of(fitted, x)
            assert peak <= least
            assert torch.linalg.vector_norm(y - expected) < 1e-5 * torch.linalg.vector_norm(expected)


class UpsamplingBlock(nn.Module):
    """A large tensor of a small one, which a group norm and a shortcut read: as in the decoder of a VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.larger = nn.Conv2d(8, 32, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(4, 32), nn.GroupNorm(4, 16)])
        self.first, self.second = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.shortcut, self.last = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.larger(nn.functional.interpolate(x, scale_factor=2))
        y = self.first(nn.functional.silu(self.norms[0](x)))
        return self.last(self.second(nn.functional.silu(self.norms[1](y))) + self.shortcut(x))


def test_results_are_recomputed_within_a_small_budget(quick: dict[str, Any]) -> None:
    model, x = UpsamplingBlock().eval(), torch.randn(1, 8, 24, 24)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
    large = 32 * 48 * 48 * 4  # bytes of the tensor that is read three times
    fitted = mucudnn.optimize(model, x, Config(memory_budget=large, **quick), progress=False)
    assert isinstance(fitted, BandedModel)
    peak, y = peak_of(fitted, x)
    assert peak <= large
    assert torch.linalg.vector_norm(y - expected) < 1e-5 * torch.linalg.vector_norm(expected)
    names = [one.name for one in fitted.tuned_graphs.findings[0].schedule.operators]
    assert names.count("conv2d") > 1
    assert re.search(r"; recomputed: .*conv2d", str(mucudnn.report(fitted)))
    assert all(names.count(name) == 1 for name in ("conv2d_4", "group_norm, moments"))


def test_the_model_itself_runs_where_it_is_faster(quick: dict[str, Any]) -> None:
    model, x = DnCNN(3, 8).eval(), torch.randn(1, 1, 24, 20)
    run = Schedule.run
    for time_s, calls in ((0.5, 1), (2.0, 0)):
        told = {0: Comparison(1.0, time_s, 0.0)}  # beside the model's second
        with mock.patch.object(Timings, "compared", return_value=told):
            fitted = mucudnn.optimize(model, x, Config(memory_budget="1MiB", **quick), progress=False)
        with torch.no_grad(), mock.patch.object(Schedule, "run", autospec=True, side_effect=run) as runs:
            fitted(x)
        assert runs.call_count == calls
    (found,) = fitted.tuned_graphs.findings
    assert replace(found, budget_bytes=found.torch_bytes).runs_torchs
    assert not replace(found, budget_bytes=found.torch_bytes - 1).runs_torchs, "its memory is beyond the budget"


def test_only_contenders_that_give_the_models_values_may_win(quick: dict[str, Any]) -> None:
    model, x, seen = DnCNN(2, 8).eval(), torch.randn(1, 1, 24, 20), list[Schedule]()
    count, compared = Schedule.count, Timings.compared

    def wrong_but_the_first(self: Schedule, arguments: tuple[Any, ...]) -> Any:
        seen.append(self)
        return count(self, arguments) + (len(seen) > 1)

    def the_last_is_the_fastest(*given: Any) -> dict[int, Comparison]:
        found = compared(*given)
        return {max(found): found[max(found)]}

    with (
        mock.patch.object(Schedule, "count", wrong_but_the_first),
        mock.patch.object(Timings, "compared", the_last_is_the_fastest),
        mock.patch.object(fitting, "_are_alike", return_value=False),
        mock.patch.object(fitting, "_NEAR", 1e9),
    ):
        fitted = fitting.fit(model, (x,), Config(**quick), silent)
    assert len(seen) > 1
    assert fitted.schedule is seen[0]


def test_what_cannot_be_placed_rules_out_plans_that_need_as_much_but_for_the_first() -> None:
    """What each operator by itself needs is not predicted; of other plans, one that needs 2 % less is tried."""
    tried = []

    def schedule(costed: object, plan: Plan, limit_bytes: float) -> SimpleNamespace:
        tried.append(plan.memory_bytes)
        needed_bytes = 120 if plan.memory_bytes > 97 or len(tried) == 1 else 90
        return SimpleNamespace(plan=plan, needed_bytes=needed_bytes, operators=[], algorithms={})

    planned: Any = [
        (None, Plan(nbytes, time_s, ())) for nbytes, time_s in ((100, 1.0), (100, 1.0), (99, 1.1), (96, 1.2))
    ]
    with mock.patch.object(fitting, "Schedule", schedule), mock.patch.object(fitting, "_compare"):
        (contender,) = fitting._contenders(planned, 100, (), None)
    assert tried == [100, 100, 96]
    assert contender.plan.memory_bytes == 96


def test_a_plan_with_other_values_leaves_the_schedule_with_the_fewest_bytes(quick: dict[str, Any]) -> None:
    model, x, compared = DnCNN(2, 8).eval(), torch.randn(1, 1, 24, 20), list[Schedule]()
    compare = fitting._compare

    def others_are_wrong(schedule: Schedule, *given: Any) -> None:
        compared.append(schedule)
        if schedule.costed.offered:  # only the one that was made without timings has none
            raise NotCapturedError("its graph gives other values")
        compare(schedule, *given)

    with mock.patch.object(fitting, "_compare", others_are_wrong):
        fitted = fitting.fit(model, (x,), Config(memory_budget="1MiB", **quick), silent)
    assert len(compared) > 1
    assert fitted.schedule is compared[-1]


def test_without_a_budget_the_whole_front_is_known(quick: dict[str, Any]) -> None:
    model, x = DnCNN(4, 16).eval(), torch.randn(1, 1, 48, 40)
    (found,) = fit_in_memory(model, [x], Config(**quick), silent).tuned_graphs.findings
    memory = [plan.memory_bytes for plan in found.front]
    times = [plan.time_s for plan in found.front]
    assert memory == sorted(memory)
    assert times == sorted(times, reverse=True)
    assert memory[0] < memory[-1]


def test_filters_are_kept_within_the_cache_budget(quick: dict[str, Any]) -> None:
    model, x = DnCNN(4, 16).eval(), torch.randn(1, 1, 48, 40)
    with torch.no_grad():
        expected = model(x)
        kept = mucudnn.optimize(model, x, Config(memory_budget="1MiB", cache_budget="none", **quick), progress=False)
        not_kept = mucudnn.optimize(model, x, Config(memory_budget="1MiB", **quick), progress=False)
        for fitted in (kept, not_kept):
            assert torch.allclose(fitted(x), expected, atol=1e-5)
    least = [one.tuned_graphs.findings[0].front[0].memory_bytes for one in (kept, not_kept)]
    assert least[0] < least[1]
    found = kept.tuned_graphs.findings[0].schedule
    again = Schedule(replace(found.costed, filters=Filters()), found.plan, found.algorithms)
    again.count((x,))
    assert again.needed_bytes == found.needed_bytes, "filters that are kept are not the call's"


def test_kept_filters_stay_within_the_cache_budget(quick: dict[str, Any]) -> None:
    model, x = DnCNN(5, 24).eval(), torch.randn(1, 1, 24, 20)
    for budget in (0, 40_000, 200_000):
        config = Config(memory_budget="1MiB", cache_budget=budget, confirm=False, **quick)
        fitted = mucudnn.optimize(model, x, config, progress=False)
        with torch.no_grad():
            fitted(x)
        kept_bytes = fitted.tuned_graphs.findings[0].schedule.costed.filters.nbytes
        assert kept_bytes <= budget
        assert kept_bytes or budget < 200_000


def test_larger_filters_than_the_cache_has_room_for_are_no_candidates(quick: dict[str, Any]) -> None:
    model, x = DnCNN(4, 24).eval(), torch.randn(1, 1, 24, 20)
    with mock.patch.object(candidates, "with_kept_filters", wraps=with_kept_filters) as keeping:
        fitted = mucudnn.optimize(model, x, Config(memory_budget="1MiB", cache_budget="1MiB", **quick), progress=False)
    choices, _ = keeping.call_args.args
    operators = fitted.tuned_graphs.findings[0].schedule.operators
    index = next(i for i, one in convolutions_of(operators).items() if one.problem.c == one.problem.k == 24)
    sizes = {choice.prepared_bytes for choice in choices[index]}
    assert len(sizes) > 1
    for kept_bytes in (min(sizes), max(sizes)):
        timed = [replace(one, seconds=1.0 if one.prepared_bytes == kept_bytes else 2.0) for one in choices[index]]
        for room in (kept_bytes - 1, kept_bytes, sum(choice.prepared_bytes for choice in timed)):
            within, kept = with_kept_filters({index: timed}, room)
            left = [choice.prepared_bytes for choice in within[index]]
            assert (index in kept) == (room >= kept_bytes)
            if room == kept_bytes:
                assert left == [kept_bytes]
            else:
                assert sorted(left) == sorted(choice.prepared_bytes for choice in timed)


def test_other_calls_run_the_model_as_it_was(quick: dict[str, Any]) -> None:
    model, x = DnCNN(3, 8).eval(), torch.randn(1, 1, 24, 20)
    other = torch.randn(1, 1, 30, 20)
    config = Config(memory_budget="1MiB", confirm=False, **quick)  # in bands even where the model itself is faster
    fitted = mucudnn.optimize(model, [x, torch.randn(1, 1, 20, 24)], config, progress=False)
    run = Schedule.run
    with (
        torch.no_grad(),
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(Schedule, "run", autospec=True, side_effect=run) as runs,
    ):
        warnings.simplefilter("always")
        fitted(x)
        fitted(torch.randn(1, 1, 20, 24))
        assert runs.call_count == 2
        for _ in range(2):
            assert torch.equal(fitted(other), model(other))
        assert runs.call_count == 2
    assert sum("was not tuned for these arguments" in str(one.message) for one in caught) == 1
    with pytest.warns(RuntimeWarning, match="gradients are recorded"):
        fitted(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        model.noise[0].bias.add_(1.0)
        with pytest.warns(RuntimeWarning, match="the values of noise.0.bias have changed"):
            y = fitted(x)
        assert torch.equal(y, model(x))
    with pytest.raises(InvalidInputError, match="for inference only"):
        fitted.train()


class Branches(nn.Module):
    """A model whose graph depends on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if float(x.sum()) > 0 else self.conv(-x)


def test_a_model_without_a_graph_is_returned_with_the_reason(quick: dict[str, Any]) -> None:
    model, x = Branches().eval(), torch.ones(1, 1, 8, 8)
    with pytest.warns(UserWarning, match="without a memory budget: torch.export cannot trace it"):
        assert mucudnn.optimize(model, x, Config(memory_budget="1MiB", **quick), progress=False) is model
    model.conv.train()
    with pytest.raises(InvalidInputError, match="memory_budget is for inference, and conv is in training mode"):
        mucudnn.optimize(model, x, Config(memory_budget="1MiB", **quick), progress=False)
