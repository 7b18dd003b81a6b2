"""``mucudnn.Conv3d`` and ``mucudnn.ConvTranspose2d``: rules of their own beside those of every kind."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, cast

import pytest
import torch
from support.problems.tuned_by_hand import assert_exact, ran, tune_by_hand
from torch import Tensor, nn

import mucudnn
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.modules.conv3d import OPERATORS, UNDIVIDED, DividedOperation
from mucudnn.modules.conv_transpose2d import conv_transpose2d
from mucudnn.tracing.convolutions import trace
from mucudnn.words.problem import Operation

# torch says it once a process, and of its own convolution
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
SIZES = (3, 2, 1)  # of y, dx and dw, of five samples


def divided(module: nn.Module, sample: tuple[int, ...], sizes: tuple[int, ...] = SIZES) -> Any:
    """Ours with the same parameters, in micro-batches of these sizes for inputs of this size, padded."""
    ours = copy.deepcopy(module)
    ours.__class__ = mucudnn.Conv3d
    operations = zip(Operation, sizes, strict=True)
    cast(mucudnn.Conv3d, ours).divided = tuple(DividedOperation(o, (5, *sample), n, 2, 1) for o, n in operations)
    return ours


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all slices that are taken."""
    taken: list[int] = []
    original = mucudnn.modules.conv3d._slices

    def slices(n: int, size: int) -> Any:
        taken.append(size)
        return original(n, size)

    monkeypatch.setattr("mucudnn.modules.conv3d._slices", slices)
    return taken


@pytest.mark.parametrize("torch_format", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize(
    ("options", "sample"),
    [
        ({}, (4, 5, 6, 7)),
        ({"padding": (1, 0, 2), "stride": (1, 2, 1), "dilation": (1, 1, 2), "bias": False}, (4, 5, 6, 7)),
        ({"groups": 2}, (4, 5, 6, 7)),
        ({"padding": 1, "padding_mode": "circular"}, (4, 7, 8, 9)),
        ({"padding": "same"}, (4, 5, 6, 7)),
        ({"padding": "same", "kernel_size": (2, 3, 2)}, (4, 6, 6, 8)),
        ({"padding": "valid", "kernel_size": 1}, (4, 5, 6, 7)),
    ],
    ids=str,
)
def test_results_and_gradients_of_any_order(
    options: dict[str, Any], sample: tuple[int, ...], torch_format: torch.memory_format, sliced: list[int]
) -> None:
    torchs = nn.Conv3d(4, 6, **{"kernel_size": 3} | options)
    x = torch.randn(5, 4, 5, 6, 7).to(memory_format=torch_format)
    assert_exact(divided(torchs, sample), torchs, x)
    assert set(sliced) == set(SIZES)


def test_dw_of_halves_is_summed_in_float32() -> None:
    """Each slice gives a sum that a bfloat16 can hold, and so is the total; on the way there are steps it cannot."""
    n = 300
    x, dy = torch.ones(n, 1, 1, 1, 1, dtype=torch.bfloat16), torch.ones(n, 1, 1, 1, 1, dtype=torch.bfloat16)
    w = torch.zeros(1, 1, 1, 1, 1, dtype=torch.bfloat16)
    dw = OPERATORS[Operation.BACKWARD_FILTER](x, w, dy, [1] * 3, [0] * 3, [1] * 3, 1, [1] * 3)
    assert dw.dtype == torch.bfloat16
    assert dw.item() == 300


@pytest.mark.parametrize(("n", "expected"), [(2, []), (3, []), (4, [3]), (9, [3])])
def test_any_number_of_samples_runs_in_the_same_slices(n: int, expected: list[int], sliced: list[int]) -> None:
    torchs = nn.Conv3d(4, 6, 3)
    x = torch.randn(n, 4, 5, 6, 7)
    with torch.no_grad():
        torch.testing.assert_close(divided(torchs, (4, 5, 6, 7))(x), torchs(x), rtol=1e-4, atol=1e-5)
    assert sliced == expected


@pytest.mark.parametrize("operation", Operation)
def test_memory_is_that_of_one_slice(operation: Operation) -> None:
    """In float64 torch takes an im2col matrix of the whole batch; in slices that of one, and its result."""
    x, w = torch.randn(8, 4, 6, 6, 6, dtype=torch.float64), torch.randn(8, 4, 3, 3, 3, dtype=torch.float64)
    rest = [1] * 3, [1] * 3, [1] * 3, 1
    dy = torch.randn(8, 8, 6, 6, 6, dtype=torch.float64)
    operator = {
        o: partial(operator, x, w, None if o is Operation.FORWARD else dy, *rest) for o, operator in OPERATORS.items()
    }[operation]
    undivided, one = ([size] * 3 for size in (UNDIVIDED, 1))
    result = operator(one)
    torch.testing.assert_close(result, operator(undivided), rtol=1e-12, atol=1e-12)
    matrix_bytes = 8 * 4 * 27 * 6**3
    undivided_bytes, sliced_bytes = (
        peak_allocated_bytes(partial(operator, sizes)) - result.nbytes for sizes in (undivided, one)
    )
    assert undivided_bytes >= 8 * matrix_bytes
    assert sliced_bytes <= matrix_bytes + max(x[0].nbytes, dy[0].nbytes, w.nbytes)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=str)
def test_the_operators_themselves_are_sound(operator: Any) -> None:
    shapes = (3, 2, 3, 4, 4), (2, 2, 2, 2, 2), (2,) if operator is OPERATORS[Operation.FORWARD] else (3, 2, 2, 3, 3)
    operands: list[Tensor] = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    torch.library.opcheck(operator, (*operands, [1] * 3, [0] * 3, [1] * 3, 1, [2] * 3))


# ``mucudnn.ConvTranspose2d`` beside torch's, over all its arguments. Nothing is measured here.


EVERY = set(Operation)
FORMATS = [torch.contiguous_format, torch.channels_last]


def pair(*args: Any, x: Tensor, algorithm: str = "gemm", **options: Any) -> tuple[nn.Module, Any]:
    """Torch's module and ours with the same parameters, tuned for x."""
    torchs = nn.ConvTranspose2d(*args, **options).to(x.dtype)
    ours = tune_by_hand(copy.deepcopy(torchs), x, algorithm)
    assert type(ours) is mucudnn.ConvTranspose2d
    return torchs, ours


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


def test_the_shape_that_is_lent_takes_no_memory() -> None:
    """Beside y there are one sample's im2col matrix and small change, and no second y."""
    x = torch.randn(16, 4, 16, 16)
    _, ours = pair(4, 64, 3, x=x, bias=False)
    with torch.no_grad():
        y = ours(x)
        peak_bytes = peak_allocated_bytes(lambda: ours(x))
    assert peak_bytes < 1.5 * y.nbytes


def test_the_operator_itself_is_sound() -> None:
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    _, ours = pair(4, 6, 3, stride=2, x=x)
    operands = [t.detach().requires_grad_() for t in (x, ours.weight, ours.bias)]
    rest = (2, 2), (0, 0), (0, 0), (1, 1), 1, ours.choices.handle
    torch.library.opcheck(conv_transpose2d, (*operands, *rest))
