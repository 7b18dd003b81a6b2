"""Who uses kept filters: inference, with the result of a fresh preparation; all else runs as if there were none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.problems.kept_layers import PROBLEM, PROBLEMS, configuration, fresh, images, kept_filter, layer
from torch import nn
from torch.nn import functional as F

from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.registry import algorithms
from mucudnn.running.choices import Choices
from mucudnn.running.executable import Executable
from mucudnn.running.filter_cache import FilterCache
from mucudnn.words.problem import ConvProblem, MemoryFormat

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled, so nothing is kept")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("torch_format", [torch.contiguous_format, torch.channels_last])
def test_a_filter_is_prepared_once_for_all_calls_and_batch_sizes(
    preparations: list[Executable], mode: Callable[[], Any], torch_format: torch.memory_format
) -> None:
    module = layer().to(memory_format=torch_format)  # type: ignore[call-overload]
    with mode():
        for n in (2, 2, 3, 1):
            x = images(n).contiguous(memory_format=torch_format)
            y = module(x)
            assert torch.equal(y, fresh(module, x))
            assert y.is_contiguous(memory_format=torch_format)
            assert y.is_inference() == torch.is_inference_mode_enabled()
            torch.testing.assert_close(y, F.conv2d(x, module.weight, module.bias, padding=1), rtol=1e-4, atol=1e-5)
    assert len(preparations) == 1


KEPT_ALGORITHMS = [a.name for a in algorithms() if not a.supports(PROBLEM) and a.workspace(PROBLEM, 2).prepared_bytes]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.memory_format)
@pytest.mark.parametrize("name", KEPT_ALGORITHMS)
def test_steps_of_every_algorithm_only_read_what_is_kept(name: str, problem: ConvProblem) -> None:
    torch_format = (
        torch.channels_last if problem.memory_format is MemoryFormat.CHANNELS_LAST else torch.contiguous_format
    )
    shapes = problem.x_shape(3), problem.w_shape(), problem.y_shape(3), problem.y_shape(3)
    x, w, y, expected = (torch.randn(shape).contiguous(memory_format=torch_format) for shape in shapes)
    bias, mixed = torch.randn(problem.k), configuration((name, 2), ("gemm", 1))
    executable = Executable.of(problem, mixed, cached=name)
    prepared = executable.prepare(w)
    before = prepared.clone()
    for _ in range(2):
        executable.execute(x, w, y.zero_(), bias, prepared)
        Executable.of(problem, mixed).execute(x, w, expected, bias)
        assert torch.equal(y, expected)
        assert torch.equal(prepared, before)
    assert executable.workspace_bytes < Executable.of(problem, mixed).workspace_bytes


def test_other_shapes_dtypes_and_batch_sizes_run_what_is_tuned_for_them(preparations: list[Executable]) -> None:
    module = layer()
    module.choices = Choices.of({PROBLEM: {4: configuration(("gemm", 2), ("gemm", 2))}})
    module.choices.executables.clear()
    with torch.no_grad():
        for x in (images(4), torch.randn(2, 4, 9, 8), torch.randn(0, 4, 8, 8)):
            torch.testing.assert_close(module(x), F.conv2d(x, module.weight, module.bias, padding=1))
        wide = copy.deepcopy(module).double()
        x = images().double()
        torch.testing.assert_close(wide(x), F.conv2d(x, wide.weight, wide.bias, padding=1))
    assert preparations == []
    assert [executable for executable in module.choices.executables.values() if executable is not None] != []


@pytest.mark.parametrize("padding", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}], ids=str)
def test_padding_of_every_kind(preparations: list[Executable], padding: dict[str, Any]) -> None:
    module, x = layer(**padding), images()
    if "padding_mode" in padding:
        module.filter_cache = FilterCache([kept_filter(replace(PROBLEM, h=10, w=10, padding=(0, 0)))])
    with torch.no_grad():
        y = module(x)
        torch.testing.assert_close(y, nn.Conv2d._conv_forward(module, x, module.weight, module.bias))
    assert len(preparations) == 1


def negated(module: nn.Module) -> None:
    """A pending negation: the bytes are not what they mean."""
    del module.weight
    module.weight = torch._neg_view(-torch.ones(6, 4, 3, 3))


def not_dense(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.randn(6, 4, 3, 6)[..., ::2])


@pytest.mark.parametrize("case", ["grad", "train", "autocast", "compile", "negated", "not dense"])
def test_nothing_is_kept_where_more_than_inference_goes_on_or_bytes_are_not_the_filter(
    preparations: list[Executable], case: str
) -> None:
    module, x = layer(), images()
    {"train": nn.Module.train, "negated": negated, "not dense": not_dense}.get(case, lambda module: None)(module)  # type: ignore[operator]
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if case == "compile" else module
    with torch.set_grad_enabled(case == "grad"), torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        y = call(x)
    expected, tolerance = F.conv2d(x, module.weight, module.bias, padding=1), 2e-2 if case == "autocast" else 1e-4
    torch.testing.assert_close(y.detach().float(), expected.detach(), rtol=tolerance, atol=tolerance)
    assert preparations == []


def test_inputs_of_every_kind_and_torchs_errors(preparations: list[Executable]) -> None:
    module, x = layer(), images(1)
    with torch.no_grad():
        assert torch.equal(module(x[0]), fresh(module, x)[0])
        strided = torch.randn(2, 4, 8, 16)[..., ::2]
        assert torch.equal(module(strided), fresh(module, strided.contiguous()))
        for bad in (torch.randn(2, 5, 8, 8), torch.randn(2, 4, 8, 8, dtype=torch.float64), torch.randn(4, 8)):
            errors = []
            for each in (module, nn.Conv2d(4, 6, 3, padding=1)):
                with pytest.raises(RuntimeError) as error:
                    each(bad)
                errors.append(str(error.value))
            assert errors[0] == errors[1]
    assert len(preparations) == 1
