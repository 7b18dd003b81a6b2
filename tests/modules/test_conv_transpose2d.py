"""``mucudnn.ConvTranspose2d`` beside torch's, over all its arguments. Nothing is measured here."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support.problems.tuned_by_hand import assert_exact, ran, results, tune_by_hand
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mucudnn
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.modules.conv_transpose2d import conv_transpose2d
from mucudnn.tracing.convolutions import trace
from mucudnn.words.problem import Operation

EVERY = set(Operation)
FORMATS = [torch.contiguous_format, torch.channels_last]


def pair(*args: Any, x: Tensor, algorithm: str = "gemm", **options: Any) -> tuple[nn.Module, Any]:
    """Torch's module and ours with the same parameters, tuned for x."""
    torchs = nn.ConvTranspose2d(*args, **options).to(x.dtype)
    ours = tune_by_hand(copy.deepcopy(torchs), x, algorithm)
    assert type(ours) is mucudnn.ConvTranspose2d
    return torchs, ours


@pytest.mark.parametrize("torch_format", FORMATS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (0, 2), "kernel_size": (4, 3), "bias": False},
        {"dilation": (2, 1), "padding": (2, 1)},
        {"groups": 2, "stride": 2},
        {"kernel_size": 1},
        {"kernel_size": 2, "stride": 2},
        {"padding": 3, "stride": 2},
    ],
    ids=str,
)
def test_results_and_gradients_of_any_order(options: dict[str, Any], torch_format: torch.memory_format) -> None:
    x = torch.randn(3, 4, 5, 6).to(memory_format=torch_format)
    torchs, ours = pair(4, 6, x=x, **{"kernel_size": 3} | options)
    assert_exact(ours, torchs, x)
    assert ran(ours) == EVERY


@pytest.mark.parametrize("algorithm", ["direct", "implicit-gemm", "winograd-2x2", "winograd-4x4"])
def test_algorithms_that_compute_backward_data(algorithm: str) -> None:
    x = torch.randn(2, 8, 9, 9)
    torchs, ours = pair(8, 8, 3, padding=1, x=x, algorithm=algorithm)
    assert_exact(ours, torchs, x, 1e-4)
    assert Operation.BACKWARD_DATA in ran(ours)


@pytest.mark.parametrize(("filters", "images"), [(a, b) for a in FORMATS for b in FORMATS])
@pytest.mark.parametrize("channels", [(4, 6), (1, 6), (4, 1), (1, 1)], ids=str)
def test_memory_formats_are_torchs(
    channels: tuple[int, int], filters: torch.memory_format, images: torch.memory_format
) -> None:
    x = torch.randn(2, channels[0], 5, 6).to(memory_format=images)
    torchs = nn.ConvTranspose2d(*channels, 3, stride=2).to(memory_format=filters)  # type: ignore[call-overload]
    ours = tune_by_hand(copy.deepcopy(torchs), x)
    assert_exact(ours, torchs, x)
    assert ran(ours)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(2, 4, 5, 6, dtype=dtype)
    torchs, ours = pair(4, 6, 3, x=x)
    assert_exact(ours, torchs, x, tolerance)
    assert ran(ours) == EVERY


@pytest.mark.parametrize("shape", [(4, 5, 6), (1, 4, 5, 6)], ids=str)
def test_unbatched_input_and_batches_of_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    torchs, ours = pair(4, 6, 3, stride=2, x=x)
    assert_exact(ours, torchs, x)
    assert ran(ours) == EVERY


@pytest.mark.parametrize("unbatched", [False, True])
def test_output_size(unbatched: bool) -> None:
    x = torch.randn(4, 5, 6) if unbatched else torch.randn(3, 4, 5, 6)

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 6, 3, stride=3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.up(x, output_size=[16, 20])
            return y

    torchs = Sized()
    ours = tune_by_hand(copy.deepcopy(torchs), x)
    assert ours(x).shape[-2:] == (16, 20)
    assert_exact(ours, torchs, x)
    assert ran(ours) == EVERY
    for model in (torchs, ours):
        with pytest.raises(ValueError, match="requested an output size"):
            model.up(x, output_size=[3, 3])


def test_output_padding_that_no_convolution_transposes_is_torchs() -> None:
    """Torch allows it up to the dilation; from the stride on the convolution of the result would be larger than x."""
    x = torch.randn(2, 4, 5, 6)
    torchs = nn.ConvTranspose2d(4, 6, 3, dilation=3, output_padding=2)
    assert trace(torchs, x) == []
    other = nn.ConvTranspose2d(4, 6, 3, dilation=3, output_padding=0)
    ours = tune_by_hand(copy.deepcopy(other), torch.randn(2, 4, 7, 8))
    torchs.load_state_dict(other.state_dict())
    ours.output_padding = (2, 2)
    assert trace(ours, x) == []
    assert_exact(ours, torchs, x)
    assert ran(ours) == set()


@pytest.mark.parametrize("shape", [(0, 4, 5, 6), (4, 4, 5, 6), (3, 4, 6, 6)], ids=["empty", "larger", "other size"])
def test_what_is_not_tuned_is_torchs(shape: tuple[int, ...]) -> None:
    torchs, ours = pair(4, 6, 3, x=torch.randn(3, 4, 5, 6))
    x = torch.randn(shape)
    assert torch.equal(ours(x), torchs(x))
    assert ran(ours) == set()


@pytest.mark.parametrize("shape", [(3, 5, 5, 6), (4, 6), (1, 3, 4, 5, 6)], ids=str)
def test_bad_input_gets_torchs_error(shape: tuple[int, ...]) -> None:
    torchs, ours = pair(4, 6, 3, x=torch.randn(3, 4, 5, 6))
    with pytest.raises(RuntimeError) as expected:
        torchs(torch.randn(shape))
    with pytest.raises(RuntimeError) as error:
        ours(torch.randn(shape))
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic: bool) -> None:
    torchs, ours = pair(4, 6, 3, stride=2, output_padding=1, x=torch.randn(3, 4, 5, 6))
    compiled = cast(nn.Module, torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic))
    for n in (3, 2):
        x = torch.randn(n, 4, 5, 6)
        first = [torch.autograd.grad(m(x).square().mean(), list(m.parameters())) for m in (compiled, torchs)]
        torch.testing.assert_close(*first, rtol=1e-5, atol=1e-5)
    assert ran(ours) == {Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER}


@pytest.mark.filterwarnings("ignore:`isinstance\\(treespec")  # of torch, about what it is going to drop
def test_export() -> None:
    x = torch.randn(3, 4, 5, 6)
    torchs, ours = pair(4, 6, 3, x=x)
    program = torch.export.export(ours, (x,)).run_decompositions()
    torch.testing.assert_close(program.module()(x), torchs(x), rtol=1e-4, atol=1e-5)
    assert ran(ours) == {Operation.BACKWARD_DATA}


def test_autocast_computes_in_its_type_as_torch_does() -> None:
    x = torch.randn(3, 4, 5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        torchs, ours = pair(4, 6, 3, x=x)
        mine, expected = results(ours, x), results(torchs, x)
    assert [t.dtype for t in mine] == [t.dtype for t in expected]
    assert mine[0].dtype == torch.bfloat16
    torch.testing.assert_close(mine[:4], expected[:4], rtol=3e-2, atol=3e-2)
    assert ran(ours) == EVERY


def test_eval_without_gradients() -> None:
    x = torch.randn(3, 4, 5, 6)
    torchs, ours = pair(4, 6, 3, x=x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(ours.eval()(x), torchs.eval()(x), rtol=1e-4, atol=1e-5)
    assert ran(ours) == {Operation.BACKWARD_DATA}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_tuned_and_state_dicts_go_both_ways(copied: Callable[[nn.Module], Any]) -> None:
    x = torch.randn(3, 4, 5, 6)
    torchs, ours = pair(4, 6, 3, x=x)
    other = copied(ours)
    assert_exact(other, torchs, x)
    assert ran(other) == EVERY
    fresh = nn.ConvTranspose2d(4, 6, 3)
    fresh.load_state_dict(other.state_dict())
    assert_exact(other, fresh, x)


def test_the_shape_that_is_lent_takes_no_memory() -> None:
    """Beside y there are one sample's im2col matrix and small change, and no second y."""
    x = torch.randn(16, 4, 16, 16)
    _, ours = pair(4, 64, 3, x=x, bias=False)
    with torch.no_grad():
        y = ours(x)
        peak_bytes = peak_allocated_bytes(lambda: ours(x))
    assert peak_bytes < 1.5 * y.nbytes


def test_flops_are_those_of_torchs() -> None:
    x = torch.randn(3, 4, 5, 6)
    counts = []
    for module in pair(4, 6, 3, stride=2, x=x):
        with FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode uses it
def test_transforms_and_forward_mode_stay_with_torch() -> None:
    x, direction = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    torchs, ours = pair(4, 6, 3, x=x)
    computed = [torch.func.jvp(module, (x,), (direction,)) for module in (ours, torchs)]
    torch.testing.assert_close(*computed)
    torch.testing.assert_close(*[torch.vmap(module)(x.unsqueeze(1)) for module in (ours, torchs)])


def test_the_operator_itself_is_sound() -> None:
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    _, ours = pair(4, 6, 3, stride=2, x=x)
    operands = [t.detach().requires_grad_() for t in (x, ours.weight, ours.bias)]
    rest = (2, 2), (0, 0), (0, 0), (1, 1), 1, ours.choices.handle
    torch.library.opcheck(conv_transpose2d, (*operands, *rest))
