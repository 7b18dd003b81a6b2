"""Compiled normalization against its definition in float64, and beside torch's own."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mucudnn.core.errors import InvalidInputError
from mucudnn.kernels.compiled import library, normalization
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.compiled.normalization import PIXELS, Norm

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
FUNCTIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda z: z,
    "ReLU": F.relu,
    "ReLU6": F.relu6,
    "SiLU": F.silu,
    "hardswish": F.hardswish,
    "leaky_relu": lambda z: F.leaky_relu(z, 0.1),
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
MASKED = (None, "ReLU", "ReLU6", "leaky_relu")
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
# (N, C, ...): single samples, channels and pixels, channels that fill no vector and more than a line, volumes, rows.
SHAPES = [(4, 6, 5, 7), (1, 1, 9, 9), (2, 3, 16, 17), (3, 48, 7, 7), (2, 40, 3, 4, 5), (5, 18), (2, 8, 11)]
SHAPES += [(2, 130, 3, 3), (2, 4, 64, 65), (3, 300, 2, 1), (6, 32, 1, 1)]
NAMES = ("y", "dx", "dadded", "dweight", "dbias")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """Operands of a normalization: x, dy and what is added have one format and dtype."""

    norm: Norm
    x: Tensor
    dy: Tensor
    weight: Tensor | None
    bias: Tensor | None
    added: Tensor | None = None
    fixed: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, norm: Norm, x: Tensor, *, is_last: bool, is_added: bool = False, is_fixed: bool = False) -> Case:
        x = in_format(x, is_last=is_last)
        added = torch.randn_like(x) if is_added else None
        c = x.shape[1]
        fixed = (torch.randn(c), torch.rand(c) + 0.5) if is_fixed else None
        return cls(norm, x, torch.randn_like(x), torch.randn(c), torch.randn(c), added, fixed)

    def compute(self) -> tuple[Tensor | None, ...]:
        """Return y and the gradients, in the order of NAMES, by the compiled functions."""
        mean, inverse = self.fixed or normalization.moments(self.x, self.norm)
        operands = mean, inverse, self.weight, self.bias
        y, mask = normalization.forward(
            self.x,
            self.norm,
            *operands,
            self.added,
            keeps_mask=self.added is not None and self.norm.function is not None,
        )
        gradients = normalization.backward(
            self.dy,
            self.x,
            self.norm,
            *operands,
            mask,
            is_fixed=self.fixed is not None,
            needs_dadded=self.added is not None,
        )
        return y, *gradients

    def define(self) -> tuple[Tensor | None, ...]:
        """Return the same by the definition, in float64."""
        leaves = [
            tensor if tensor is None else tensor.detach().double().requires_grad_()
            for tensor in (self.x, self.added, self.weight, self.bias)
        ]
        x, added, weight, bias = leaves
        assert x is not None
        c = x.shape[1]
        per_channel = (1, c) + (1,) * (x.dim() - 2)
        if self.fixed is None:
            mean, inverse = moments_of(x, self.norm)
        else:
            mean, inverse = (value.double().view(per_channel) for value in self.fixed)
        z = (x - mean) * inverse
        z = z if weight is None else z * weight.view(per_channel)
        z = z if bias is None else z + bias.view(per_channel)
        y = FUNCTIONS[self.norm.function](z if added is None else z + added)
        y.backward(self.dy.double())
        return y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)


def in_format(x: Tensor, *, is_last: bool) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if is_last else x.contiguous()


def moments_of(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return the means and 1 / sqrt(variance + eps), broadcast over x."""
    sets = {0: x.flatten(2) if x.dim() > 2 else x[..., None], PIXELS: x}.get(norm.sets)
    if norm.sets == PIXELS:
        dims: tuple[int, ...] = (1,)
    elif norm.sets == 0:
        dims = (0, 2)
    else:
        sets, dims = x.reshape(x.shape[0], norm.sets, -1), (2,)
    assert sets is not None
    mean = sets.mean(dims, keepdim=True).expand_as(sets).reshape(x.shape)
    variance = sets.var(dims, unbiased=False, keepdim=True).expand_as(sets).reshape(x.shape)
    return mean, (variance + norm.eps).rsqrt()


def error(result: Tensor | None, expected: Tensor | None, terms: int = 1) -> float:
    """Return the error in the L2 norm, relative to the result or to sums of so many terms near 1 that do not cancel."""
    if result is None or expected is None:
        assert result is expected
        return 0.0
    return float((result.double() - expected).norm() / max(float(expected.norm()), (terms * expected.numel()) ** 0.5))


def random_cases() -> Iterator[Case]:
    """Yield half of all shapes, kinds of statistics, functions and formats, with operands and threads at random."""
    random = Random(0)
    for shape, kind, function, is_last in product(SHAPES, (0, 1, 2, "instance", PIXELS), FUNCTIONS, (False, True)):
        c, pixels = shape[1], torch.Size(shape[2:]).numel()
        sets = c if kind == "instance" else int(kind)
        size = {0: shape[0] * pixels, PIXELS: c}.get(sets, pixels * c // max(sets, 1))
        is_refused = (sets > 0 and c % sets) or (sets == PIXELS and not is_last)
        if size < 9 or is_refused or random.random() < 0.5:  # dx of few elements is all rounding
            continue
        torch.set_num_threads(random.choice((1, 2, 3)))
        x = (torch.randn(shape) * 2 + 1.5).to(random.choice(list(EPSILON)))
        flags = {
            "is_added": function in MASKED and random.random() < 0.5,
            "is_fixed": not sets and random.random() < 0.3,
        }
        yield Case.of(Norm(sets, 1e-3, function, slope=0.1), x, is_last=is_last, **flags)


def test_every_kind_computes_its_definition() -> None:
    wrong = {}
    for case in random_cases():
        assert normalization.why_not(case.x, case.norm) is None
        terms = (1, 1, 1, *[case.x.numel() // case.x.shape[1]] * 2)
        errors = map(error, case.compute(), case.define(), terms)
        wrong |= {
            (*case.x.shape, case.x.dtype, case.norm, case.x.stride(), torch.get_num_threads(), name): value
            for name, value in zip(NAMES, errors, strict=True)
            if not value < 16 * EPSILON[case.x.dtype]
        }
    assert wrong == {}


def torchs(case: Case) -> tuple[Tensor | None, ...]:
    """Return y and the gradients, in the order of NAMES, by torch's operators."""
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_()
        for tensor in (case.x, case.added, case.weight, case.bias)
    ]
    x, added, weight, bias = leaves
    assert x is not None
    norm = case.norm
    if norm.sets == 0:
        z = F.batch_norm(x, None, None, weight, bias, training=True, eps=norm.eps)
    elif norm.sets == PIXELS:
        z = F.layer_norm(x.movedim(1, -1), x.shape[1:2], weight, bias, norm.eps).movedim(-1, 1)
    else:
        z = F.group_norm(x, norm.sets, weight, bias, norm.eps)
    y = FUNCTIONS[norm.function](z if added is None else z + added)
    y.backward(case.dy)
    return y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)


def test_errors_are_at_most_one_and_a_half_times_torch_s() -> None:
    """On the mean over sizes and functions; also with means a thousand times the deviation, and a large eps."""
    errors: defaultdict[tuple[object, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    shapes = ((8, 24, 28, 28), (2, 16, 64, 65), (16, 64, 7, 7))
    kinds = ((0.1, 1.0, 1e-5), (1000.0, 1.0, 1e-5), (0.1, 0.01, 1.0))  # mean, deviation, eps
    functions = (None, "ReLU", "SiLU", "gelu", "gelu_tanh")
    for shape, kind, is_last, sets, function in product(shapes, kinds, (False, True), (0, 1, PIXELS), functions):
        mean, deviation, eps = kind
        if (sets == PIXELS and not is_last) or (function == "ReLU" and mean > 1):  # where a rounded sign is all
            continue
        case = Case.of(Norm(sets, eps, function), torch.randn(shape) * deviation + mean, is_last=is_last)
        exact = case.define()
        for which, results in enumerate((case.compute(), torchs(case))):
            for name, result, expected in zip(NAMES, results, exact, strict=True):
                errors[*kind, is_last, sets, name][which] += error(result, expected)
    assert {case: pair for case, pair in errors.items() if not pair[0] <= 1.5 * pair[1]} == {}


def test_errors_of_statistics_are_at_most_one_and_a_half_times_torch_s() -> None:
    for shape, (mean, deviation), is_last in product(
        ((8, 64, 28, 28), (2, 64, 64, 65)), ((0.0, 1.0), (1000.0, 1.0), (0.1, 1e-3)), (False, True)
    ):
        x = in_format(torch.randn(shape) * deviation + mean, is_last=is_last)
        expected = torch.var_mean(x.double(), (0, 2, 3), unbiased=False)[::-1]
        _, *torch_s = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
        for own, other, exact in zip(
            normalization.moments(x, Norm(0, 1e-5)), torch_s, (expected[0], (expected[1] + 1e-5).rsqrt()), strict=True
        ):
            assert (own - exact).norm() <= 1.5 * (other - exact).norm(), (shape, mean, is_last)


def test_running_statistics_are_updated_as_torch_does() -> None:
    """In place, with the unbiased variance; those of instances are means over samples."""
    for is_last, momentum, dtype in product((False, True), (0.1, 1.0), (torch.float32, torch.bfloat16)):
        x = in_format((torch.randn(3, 5, 6, 7) * 2 + 1).to(dtype), is_last=is_last)
        ours, expected = ([torch.randn(5).to(dtype), torch.rand(5).to(dtype)] for _ in range(2))
        for own, other in zip(ours, expected, strict=True):
            other.copy_(own)
        normalization.moments(x, Norm(0, 1e-5), (*ours, momentum))
        F.batch_norm(x, *expected, training=True, momentum=momentum)
        torch.testing.assert_close(ours, expected)
        if dtype is torch.bfloat16:  # which torch rounds for each sample
            continue
        normalization.moments(x, Norm(5, 1e-5), (*ours, momentum))
        F.instance_norm(x, *expected, momentum=momentum)
        torch.testing.assert_close(ours, expected)


def test_nan_and_infinity_spread_as_in_torch() -> None:
    for bad, sets, is_last, function in product((torch.nan, torch.inf), (0, 2), (False, True), (None, "ReLU", "ReLU6")):
        x = torch.randn(2, 4, 5, 5)
        x[1, 2, 3, 0] = bad
        case = Case.of(Norm(sets, 1e-5, function), x, is_last=is_last)
        case.dy[0, 1, 2, 2] = torch.nan
        for name, own, other in zip(NAMES, case.compute(), torchs(case), strict=True):
            if own is not None and other is not None:
                assert torch.equal(own.isnan(), other.isnan()), (name, bad, sets, is_last, function)


def test_the_same_bits_with_the_same_number_of_threads() -> None:
    for sets, is_last, threads in product((0, 1), (False, True), (1, 2, 3, 4)):
        torch.set_num_threads(threads)
        case = Case.of(Norm(sets, 1e-5, "SiLU"), torch.randn(2, 3, 65, 64), is_last=is_last)
        first, *others = (case.compute() for _ in range(4))
        for other in others:
            assert all(a is b or torch.equal(a, b) for a, b in zip(first, other, strict=True) if a is not None)


def test_gradients_that_are_not_needed_are_not_computed() -> None:
    case = Case.of(Norm(0, 1e-5), torch.randn(2, 8, 5, 5), is_last=True)
    mean, inverse = normalization.moments(case.x, case.norm)
    dx, dadded, dweight, dbias = normalization.backward(
        case.dy, case.x, case.norm, mean, inverse, None, case.bias, needs_dx=False, needs_dadded=True
    )
    assert (dx, dweight) == (None, None)
    assert dadded is case.dy  # without a function
    torch.testing.assert_close(dbias, case.dy.sum((0, 2, 3)))


def test_what_is_not_compiled_is_said() -> None:
    x, norm = torch.randn(2, 6, 4, 4), Norm(0, 1e-5)
    assert normalization.why_not(x, norm) is None
    for other, of_other, words in (
        (x.double(), norm, "float64"),
        (x.to("meta"), norm, "on meta"),
        (x[:, :, ::2], norm, "strides"),
        (x[:0], norm, "not empty"),
        (x[0, 0, 0], norm, "must be"),
        (x, replace(norm, sets=4), "not 4 equal groups"),
        (x, replace(norm, sets=PIXELS), "channels last"),
        (x, replace(norm, function="sigmoid"), "sigmoid"),
    ):
        assert words in (normalization.why_not(other, of_other) or "")


def test_operands_that_do_not_belong_together_are_refused() -> None:
    """Before anything is written."""
    case = Case.of(Norm(0, 1e-5, "ReLU"), torch.randn(2, 6, 4, 4), is_last=False, is_added=True)
    x, mean, inverse = case.x, *normalization.moments(case.x, case.norm)
    good = {"x": x, "norm": case.norm, "mean": mean, "inverse": inverse, "weight": case.weight, "bias": case.bias}
    for changes, words in (
        ({"mean": mean[:5]}, "mean holds 20 bytes"),
        ({"weight": torch.ones(7)}, "weight holds 28 bytes"),
        ({"weight": case.weight.double()}, "float64"),
        ({"weight": case.weight.bfloat16()}, "bfloat16"),
        ({"added": x.contiguous(memory_format=torch.channels_last)}, "strides"),
        ({"added": x.bfloat16()}, "bfloat16"),
        ({"added": x[:1]}, "1, 6, 4, 4"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            normalization.forward(**good | changes)
    _, mask = normalization.forward(**good, added=case.added, keeps_mask=True)
    assert mask is not None
    with pytest.raises(InvalidInputError, match="mask holds"):
        normalization.backward(case.dy, **good, mask=mask[:-1])
    statistics = torch.zeros(6), torch.zeros(5), 0.1
    with pytest.raises(InvalidInputError, match="running variance holds 20 bytes"):
        normalization.moments(x, case.norm, statistics)
    assert not statistics[0].any()


def test_sizes_that_need_more_than_64_bits_are_refused() -> None:
    argument = library.NormArgument(n=2**40, c=2**20, pixels=2**20, threads=1, eps=1e-5)
    with pytest.raises(InvalidInputError, match="64 bits"):
        library.function("norm_mask_bytes")(ctypes.byref(argument))
