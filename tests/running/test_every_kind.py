"""Rules that tuned modules of every kind keep: as torch's in everything but what computes. Nothing is measured here."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support import compiled
from support.problems.tuned_by_hand import assert_exact, ran, results, tune_by_hand
from torch import Tensor, nn
from torch.autograd import forward_ad

from mucudnn.core.problem import Operation

# torch says it once a process, and of its own convolution
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

EVERY = set(Operation)
KINDS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "Conv1d": (nn.Conv1d, (3, 4, 9)),
    "Conv2d": (nn.Conv2d, (3, 4, 7, 6)),
    "ConvTranspose2d": (nn.ConvTranspose2d, (3, 4, 5, 6)),
    "ConvTranspose1d": (nn.ConvTranspose1d, (3, 4, 6)),
    "ConvTranspose3d": (nn.ConvTranspose3d, (3, 4, 3, 5, 4)),
}
LAST = {"ConvTranspose2d": [torch.channels_last], "ConvTranspose3d": [torch.channels_last_3d]}
each_kind = pytest.mark.parametrize("kind", KINDS)


def pair(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any, Tensor]:
    """Torch's module and ours with the same parameters, and the x for which ours is tuned."""
    make, shape = KINDS[kind]
    torchs, x = make(4, 6, 3).to(dtype), torch.randn(shape, dtype=dtype)
    return torchs, tuned(kind, torchs, x), x


def tuned(kind: str, torchs: nn.Module, x: Tensor) -> Any:
    """Ours with the parameters of torch's module, tuned for x."""
    return tune_by_hand(copy.deepcopy(torchs), x, "frames-native" if kind == "ConvTranspose3d" else "gemm")


def forward_of(kind: str) -> Operation:
    return Operation.BACKWARD_DATA if "Transpose" in kind else Operation.FORWARD


SAME: list[dict[str, Any]] = [
    {"padding": "valid"},
    *({"padding": "same", "kernel_size": size} for size in (3, 2, 4)),
    {"padding": "same", "kernel_size": 2, "padding_mode": "reflect"},
    *({"padding": 2, "padding_mode": mode} for mode in ("reflect", "replicate", "circular")),
]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Conv1d": [
        *({}, {"padding": 2, "stride": 2, "dilation": 2, "bias": False}, {"groups": 2}, {"kernel_size": 1}),
        *(*SAME, {"padding": "same", "kernel_size": 2, "dilation": 3}),
    ],
    "Conv2d": [
        *({"padding": 1}, {"padding": (2, 0), "stride": (2, 1), "dilation": (1, 2), "bias": False}, {"groups": 2}),
        *(*SAME, *({"padding": "same", "kernel_size": size} for size in ((4, 1), (2, 3)))),
        {"padding": "same", "kernel_size": 2, "dilation": (2, 3)},
    ],
    "ConvTranspose2d": [
        *({}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": (2, 1), "padding": (2, 1)}),
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (0, 2), "kernel_size": (4, 3), "bias": False},
        *({"groups": 2, "stride": 2}, {"kernel_size": 1}, {"kernel_size": 2, "stride": 2}, {"padding": 3, "stride": 2}),
    ],
    "ConvTranspose1d": [
        *({}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2, "padding": 2, "bias": False}),
        *({"groups": 2, "stride": 3, "output_padding": 2}, {"kernel_size": 1}, {"kernel_size": 4, "stride": 2}),
    ],
    "ConvTranspose3d": [
        *({}, {"stride": (1, 2, 3), "padding": 1, "output_padding": (0, 1, 2)}, {"dilation": (2, 1, 1), "bias": False}),
        *({"groups": 2, "stride": 2}, {"kernel_size": 1}, {"kernel_size": (1, 2, 2), "stride": (1, 2, 2)}),
    ],
}


@pytest.mark.parametrize(("kind", "options"), [(kind, one) for kind in OPTIONS for one in OPTIONS[kind]], ids=str)
def test_results_and_gradients_of_any_order(kind: str, options: dict[str, Any]) -> None:
    make, shape = KINDS[kind]
    for torch_format in (torch.contiguous_format, *LAST.get(kind, ())):
        torchs, x = make(4, 6, **{"kernel_size": 3} | options), torch.randn(shape).to(memory_format=torch_format)
        ours = tuned(kind, torchs, x)
        assert_exact(ours, torchs, x)
        assert ran(ours) == EVERY


ALGORITHMS = {
    "Conv1d": ("direct", "implicit-gemm", "fft"),
    "ConvTranspose2d": ("direct", "implicit-gemm", "winograd-2x2", "winograd-4x4"),
    "ConvTranspose1d": ("direct", "implicit-gemm", "fft"),
    "ConvTranspose3d": ("frames-implicit-gemm", "frames-winograd-2x2", "native-other-format"),
}


@pytest.mark.parametrize(("kind", "algorithm"), [(kind, name) for kind in ALGORITHMS for name in ALGORITHMS[kind]])
def test_other_algorithms(kind: str, algorithm: str) -> None:
    if "winograd" in algorithm:
        compiled.algorithm(algorithm.removeprefix("frames-"))  # not in every build
    make, shape = KINDS[kind]
    torchs, x = make(8, 8, 3, padding=1), torch.randn(2, 8, *(9 for _ in shape[2:]))
    ours = tune_by_hand(copy.deepcopy(torchs), x, algorithm)
    assert_exact(ours, torchs, x, 1e-4)
    assert forward_of(kind) in ran(ours)


@each_kind
def test_inputs_of_any_layout(kind: str) -> None:
    make, (n, c, *size) = KINDS[kind]
    for x in (
        torch.randn(c, *size),  # unbatched
        torch.randn(1, c, *size),
        torch.randn(n, *size, c).movedim(-1, 1),  # as of sequences with their channels last
        torch.randn(c, n, *size[:-1], 2 * size[-1]).transpose(0, 1)[..., ::2],
    ):
        torchs = make(4, 6, 3)
        ours = tuned(kind, torchs, x)
        assert_exact(ours, torchs, x)
        assert ran(ours) == EVERY


@each_kind
def test_dtypes(kind: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        torchs, ours, x = pair(kind, dtype)
        assert_exact(ours, torchs, x, tolerance)
        assert ran(ours) == EVERY


@each_kind
def test_sizes_that_are_not_tuned_are_torchs(kind: str) -> None:
    torchs, ours, x = pair(kind)
    others = (x[:0], torch.cat((x, x), -1), x[0], torch.cat((x, x)))
    for other in others:
        assert torch.equal(ours(other), torchs(other))
    assert ran(ours) == set()


@each_kind
def test_bad_input_gets_torchs_error(kind: str) -> None:
    torchs, ours, x = pair(kind)
    channels = torch.cat((x, x), 1)
    small = () if "Transpose" in kind else (x[..., :1],)
    for bad in (channels, x[0, 0], x[None], *small):
        with pytest.raises(RuntimeError) as expected:
            torchs(bad)
        with pytest.raises(RuntimeError) as error:
            ours(bad)
        assert str(error.value) == str(expected.value)


@each_kind
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(kind: str, dynamic: bool) -> None:
    torchs, ours, x = pair(kind)
    compiled = cast(nn.Module, torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic))
    for given in (x, x[:2]):
        first = [torch.autograd.grad(m(given).square().mean(), list(m.parameters())) for m in (compiled, torchs)]
        torch.testing.assert_close(*first, rtol=1e-5, atol=1e-5)
    assert ran(ours) == {forward_of(kind), Operation.BACKWARD_FILTER}


def transformed(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    _, tangent = torch.func.jvp(module, (x,), (x.cos(),))
    each = torch.vmap(torch.func.grad(lambda x: module(x).square().sum()))(x.unsqueeze(1))
    with forward_ad.dual_level():
        return tangent, each, forward_ad.unpack_dual(module(forward_ad.make_dual(x, x.sin()))).tangent


@each_kind
@pytest.mark.filterwarnings("ignore:`torch.jit")  # of torch, about its own code
def test_transforms_inside_a_compiled_function_are_of_torchs_own(kind: str) -> None:
    torchs, ours, x = pair(kind)
    compiled: Any = torch.compile(transformed, backend="eager")
    torch.testing.assert_close(compiled(ours, x), transformed(torchs, x), rtol=1e-4, atol=1e-4)
    assert ran(ours) == set()


@each_kind
@pytest.mark.filterwarnings("ignore:`isinstance\\(treespec")  # of torch, about what it is going to drop
def test_export(kind: str) -> None:
    torchs, ours, x = pair(kind)
    program = torch.export.export(ours, (x,)).run_decompositions()
    torch.testing.assert_close(program.module()(x), torchs(x), rtol=1e-4, atol=1e-5)
    assert ran(ours) == set(), "the program has torch's convolution"


@each_kind
def test_autocast_computes_in_its_type_as_torch_does(kind: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        torchs, ours, x = pair(kind)
        mine, expected = results(ours, x), results(torchs, x)
    assert [t.dtype for t in mine] == [t.dtype for t in expected]
    assert mine[0].dtype == torch.bfloat16
    torch.testing.assert_close(mine[:4], expected[:4], rtol=3e-2, atol=3e-2)
    assert ran(ours) == EVERY


def through_a_file(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@each_kind
def test_copies_are_tuned_and_state_dicts_go_both_ways(kind: str) -> None:
    torchs, ours, x = pair(kind)
    for copied in (copy.deepcopy, through_a_file, lambda module: pickle.loads(pickle.dumps(module))):
        other = copied(ours)
        assert_exact(other, torchs, x)
        assert ran(other) == EVERY
    fresh = KINDS[kind][0](4, 6, 3)
    assert list(ours.state_dict()) == list(fresh.state_dict())
    ours.load_state_dict(fresh.state_dict())
    assert_exact(ours, fresh, x)
    fresh.load_state_dict(torchs.state_dict())
    assert torch.equal(fresh.weight, cast(nn.Conv2d, torchs).weight)
