"""Bound stages: one call of C computes, bit for bit, what ``open``, ``step`` and ``close`` do, and refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.compiled.stages import CompiledStage, Entries
from mucudnn.kernels.contract.algorithm import Bindable, Workspace, fuses
from mucudnn.kernels.contract.buffers import TORCH_FORMATS, torch_dtype
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.kernels.registry import algorithm
from mucudnn.testing.guarded_call import Call
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
by_operation = pytest.mark.parametrize("operation", Operation)
NAMES = ("winograd-2x2", "winograd-6x6", "winograd-2x2-5x5", "winograd-4x4-stride2")
NAMES += ("implicit-gemm", "pointwise", "depthwise", "loop-nest")
SLICES = {
    "whole": (slice(0, 5),),
    "cut": (slice(0, 2), slice(2, 4), slice(4, 5)),
    "any order": (slice(3, 5), slice(0, 3)),
}


def problem_for(name: str, operation: Operation, memory_format: MemoryFormat, **changes: Any) -> ConvProblem:
    taps = 5 if "5x5" in name else 3
    sizes: dict[str, Any] = {"c": 6, "h": 9, "w": 8, "k": 10, "r": taps, "s": taps, "padding": (1, 2)} | changes
    if name.endswith("stride2"):
        sizes |= {"stride": (2, 2)}
    if name in ("implicit-gemm", "depthwise", "loop-nest"):
        sizes |= {"stride": (2, 1), "dilation": (1, 2)}
    if name == "pointwise":
        sizes |= {"c": 8, "r": 1, "s": 1, "padding": (0, 0), "stride": (2, 1)}
    return ConvProblem(operation, memory_format=memory_format, **sizes)


def largest_workspace(name: str, problem: ConvProblem, slices: tuple[slice, ...]) -> Workspace:
    every = [algorithm(name).workspace(problem, each.stop - each.start) for each in slices]
    return Workspace(max(w.prepared_bytes for w in every), max(w.scratch_bytes for w in every))


@by_operation
@pytest.mark.parametrize("slices", SLICES.values(), ids=SLICES)
@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize(
    ("name", "groups", "dtype"),
    [(name, groups, "float32") for name in NAMES for groups in (1, 2)]
    + [(name, *half) for name in NAMES for half in ((2, "bfloat16"), (1, "float16"))],
)
def test_one_call_is_open_every_step_and_close(
    name: str, groups: int, dtype: str, memory_format: MemoryFormat, slices: tuple[slice, ...], operation: Operation
) -> None:
    problem = problem_for(name, operation, memory_format, groups=groups, dtype=dtype)
    if algorithm(name).supports_micro_batch(problem, 1) is not None:
        slices = SLICES["whole"]
    chosen = algorithm(name)
    workspace = largest_workspace(name, problem, slices)
    is_open = operation is Operation.FORWARD and len(slices) > 1 and workspace.prepared_bytes > 0
    bias = torch.randn(problem.k).to(torch_dtype(problem)) if operation is Operation.FORWARD else None
    added = torch.randn(problem.y_shape(5)).to(torch_dtype(problem), memory_format=TORCH_FORMATS[memory_format])
    epilogue = Epilogue("ReLU6", added) if fuses(chosen, problem) else None
    results = []
    for is_bound in (False, True):
        torch.manual_seed(0)
        call = Call(problem, 5)
        prepared, scratch = (call.memory.buffer(n) for n in (workspace.prepared_bytes, workspace.scratch_bytes))
        written: Tensor = {Operation.FORWARD: call.y, Operation.BACKWARD_DATA: call.x}.get(operation, call.w)
        written.zero_()
        if is_bound:
            assert isinstance(chosen, Bindable)
            if is_open:
                chosen.open(problem, call.w, prepared)
                call.w.fill_(torch.nan)
            stage = chosen.bound(problem, 5, slices, workspace, is_open=is_open)
            assert stage is not None
            addresses = [t.data_ptr() for t in (call.x, call.w, call.y)]
            buffers = prepared.data_ptr(), scratch.data_ptr()
            stage(*addresses, None if bias is None else bias.data_ptr(), *buffers, epilogue)
        else:
            chosen.open(problem, call.w, prepared)
            for each in slices:
                step: Any = chosen.step if epilogue is None else partial(chosen.step, epilogue=epilogue.of(each))
                step(problem, call.x[each], call.w, call.y[each], bias, prepared, scratch)
            chosen.close(problem, call.w, prepared)
        assert call.memory.trespass() is None
        results.append(written.clone())
    assert torch.equal(*results)


def run(stage: CompiledStage, problem: ConvProblem, n: int) -> list[Tensor]:
    """Call it on tensors full of ones, and buffers that are large enough. Returns all of them."""
    shapes = problem.x_shape(n), problem.w_shape(), problem.y_shape(n)
    tensors = [torch.ones(shape) for shape in shapes] + [torch.ones(2**16) for _ in range(2)]
    x, w, y, prepared, scratch = (t.data_ptr() for t in tensors)
    stage(x, w, y, None, prepared, scratch)
    return tensors


@by_operation
@pytest.mark.parametrize("name", ["winograd-4x4", "implicit-gemm", "pointwise", "depthwise"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slices": (slice(0, 3),)}, "the number of samples of a slice is 3; allowed is 1 to 2"),
        ({"slices": (slice(1, 1),)}, "the number of samples of a slice is 0"),
        ({"slices": (slice(2, 3),)}, "the first sample of a slice is 2; allowed is 0 to 1"),
        ({"slices": (slice(-1, 1),)}, "the first sample of a slice is -1"),
        ({"prepared": -4}, "prepared holds"),
        ({"scratch": -4}, "scratch holds"),
    ],
    ids=str,
)
def test_what_does_not_belong_together_is_refused(
    name: str, operation: Operation, changes: dict[str, Any], message: str
) -> None:
    torch.set_num_threads(2)  # with one thread, some need no buffer
    taps = 1 if name == "pointwise" else 3
    problem = ConvProblem(operation, 4, 8, 8, 4, taps, taps, padding=(taps // 2, taps // 2))
    declared = algorithm(name).workspace(problem, 2)
    workspace = Workspace(
        declared.prepared_bytes + changes.get("prepared", 0), declared.scratch_bytes + changes.get("scratch", 0)
    )
    entry, tile = ("winograd", 4) if name == "winograd-4x4" else (name.replace("-", "_"), 0)
    stage = Entries(entry, tile).bound(problem, 2, changes.get("slices", (slice(0, 2),)), workspace)
    with pytest.raises(InvalidInputError, match=message):
        run(stage, problem, 2)


def test_a_tile_that_is_not_compiled_is_refused() -> None:
    problem = ConvProblem(Operation.FORWARD, 4, 8, 8, 4, 3, 3, padding=(1, 1))
    for tile, message in ((3, r"F\(3x3, 3x3\) with .* is not among the compiled ones"), (0, "outputs of a tile is 0")):
        with pytest.raises(InvalidInputError, match=message):
            run(Entries("winograd", tile).bound(problem, 2, (slice(0, 2),), Workspace(2**18, 2**18)), problem, 2)


def test_what_runs_on_torchs_operators_cannot_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem(Operation.FORWARD, 4, 8, 8, 4, 3, 3, dtype="float64")
    winograd = algorithm("winograd-4x4")
    assert isinstance(winograd, Bindable)
    assert winograd.bound(problem, 2, (slice(0, 2),), winograd.workspace(problem, 2)) is None
    assert not isinstance(algorithm("gemm"), Bindable)
