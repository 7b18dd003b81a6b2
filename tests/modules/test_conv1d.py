"""``mucudnn.Conv1d`` beside torch's, over all its arguments. Nothing is measured here."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support.problems.tuned_by_hand import assert_exact, ran, results, tune_by_hand
from torch import nn

import mucudnn
from mucudnn.words.problem import Operation

# torch says it once a process, and of its own convolution
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
EVERY = set(Operation)


def pair(*args: Any, x: torch.Tensor, algorithm: str = "gemm", **options: Any) -> tuple[nn.Module, Any]:
    """Torch's module and ours with the same parameters, tuned for x."""
    torchs = nn.Conv1d(*args, **options).to(x.dtype)
    ours = tune_by_hand(copy.deepcopy(torchs), x, algorithm)
    assert type(ours) is mucudnn.Conv1d
    return torchs, ours


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 2, "stride": 2, "dilation": 2, "bias": False},
        {"groups": 2},
        {"kernel_size": 1},
        *({"padding": 2, "padding_mode": mode} for mode in ("reflect", "replicate", "circular")),
        {"padding": "valid"},
        *({"padding": "same", "kernel_size": size} for size in (3, 2, 4)),
        {"padding": "same", "kernel_size": 2, "dilation": 3},
        {"padding": "same", "kernel_size": 2, "padding_mode": "reflect"},
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [9, 17])
def test_results_and_gradients_of_any_order(options: dict[str, Any], length: int) -> None:
    x = torch.randn(3, 4, length)
    torchs, ours = pair(4, 6, x=x, **{"kernel_size": 3} | options)
    assert_exact(ours, torchs, x)
    assert ran(ours) == EVERY


@pytest.mark.parametrize("algorithm", ["direct", "implicit-gemm", "fft"])
def test_other_algorithms(algorithm: str) -> None:
    x = torch.randn(2, 8, 20)
    torchs, ours = pair(8, 8, 5, padding=2, x=x, algorithm=algorithm)
    assert_exact(ours, torchs, x, 1e-4)
    assert Operation.FORWARD in ran(ours)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(2, 4, 9, dtype=dtype)
    torchs, ours = pair(4, 6, 3, x=x)
    assert_exact(ours, torchs, x, tolerance)
    assert ran(ours) == EVERY


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 9),
        torch.randn(1, 4, 9),
        torch.randn(3, 9, 4).transpose(1, 2),  # as of sequences with their channels last
        torch.randn(4, 3, 18).transpose(0, 1)[..., ::2],
        torch.randn(3, 4, 9).as_strided((3, 4, 9), (36, 1, 4)),
    ],
    ids=["unbatched", "one", "channels last", "strided", "as strided"],
)
def test_inputs_of_any_layout(x: torch.Tensor) -> None:
    torchs, ours = pair(4, 6, 3, x=x)
    assert_exact(ours, torchs, x)
    assert ran(ours) == EVERY


@pytest.mark.parametrize("shape", [(0, 4, 9), (4, 4, 9), (3, 4, 8)], ids=["empty", "larger", "other size"])
def test_what_is_not_tuned_is_torchs(shape: tuple[int, ...]) -> None:
    torchs, ours = pair(4, 6, 3, x=torch.randn(3, 4, 9))
    x = torch.randn(shape)
    assert torch.equal(ours(x), torchs(x))
    assert ran(ours) == set()


@pytest.mark.parametrize("shape", [(3, 5, 9), (9,), (3, 4, 1), (1, 3, 4, 9)], ids=str)
def test_bad_input_gets_torchs_error(shape: tuple[int, ...]) -> None:
    torchs, ours = pair(4, 6, 3, x=torch.randn(3, 4, 9))
    with pytest.raises(RuntimeError) as expected:
        torchs(torch.randn(shape))
    with pytest.raises(RuntimeError) as error:
        ours(torch.randn(shape))
    assert str(error.value) == str(expected.value)


def test_compile_without_graph_breaks() -> None:
    torchs, ours = pair(4, 6, 2, padding="same", x=torch.randn(3, 4, 9))
    compiled = cast(nn.Module, torch.compile(ours, backend="aot_eager", fullgraph=True))
    x = torch.randn(3, 4, 9)
    first = [torch.autograd.grad(m(x).square().mean(), list(m.parameters())) for m in (compiled, torchs)]
    torch.testing.assert_close(*first, rtol=1e-5, atol=1e-5)
    assert ran(ours) == {Operation.FORWARD, Operation.BACKWARD_FILTER}


@pytest.mark.filterwarnings("ignore:`isinstance\\(treespec")  # of torch, about what it is going to drop
def test_export() -> None:
    x = torch.randn(3, 4, 9)
    torchs, ours = pair(4, 6, 3, x=x)
    program = torch.export.export(ours, (x,)).run_decompositions()
    torch.testing.assert_close(program.module()(x), torchs(x), rtol=1e-4, atol=1e-5)
    assert ran(ours) == {Operation.FORWARD}


def test_autocast_computes_in_its_type_as_torch_does() -> None:
    x = torch.randn(3, 4, 9)
    with torch.autocast("cpu", torch.bfloat16):
        torchs, ours = pair(4, 6, 3, x=x)
        mine, expected = results(ours, x), results(torchs, x)
    assert [t.dtype for t in mine] == [t.dtype for t in expected]
    torch.testing.assert_close(mine[:4], expected[:4], rtol=3e-2, atol=3e-2)
    assert ran(ours) == EVERY


def test_eval_without_gradients() -> None:
    x = torch.randn(3, 4, 9)
    torchs, ours = pair(4, 6, 3, x=x)
    with torch.inference_mode():
        torch.testing.assert_close(ours.eval()(x), torchs.eval()(x), rtol=1e-4, atol=1e-5)
    assert ran(ours) == {Operation.FORWARD}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_tuned_and_state_dicts_go_both_ways(copied: Callable[[nn.Module], Any]) -> None:
    x = torch.randn(3, 4, 9)
    torchs, ours = pair(4, 6, 3, x=x)
    other = copied(ours)
    assert_exact(other, torchs, x)
    assert ran(other) == EVERY
    fresh = nn.Conv1d(4, 6, 3)
    fresh.load_state_dict(other.state_dict())
    assert_exact(other, fresh, x)
