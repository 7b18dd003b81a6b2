"""Graphs of volumes: each operator in bands of frames, causal padding, and views of frames as a batch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.graph.capture import NotCapturedError, capture
from mucudnn.graph.costed import CostedGraph, solver_graph
from mucudnn.graph.operators.convolution import Convolution
from mucudnn.graph.operators.moves import DepthToSpace, Shuffle
from mucudnn.graph.operators.operator import Barrier, Captured
from mucudnn.graph.operators.windows import Padding
from mucudnn.graph.schedule import Schedule
from mucudnn.graph.video.frames import FrameByFrame
from mucudnn.solver.bands import Cut, Segment
from mucudnn.solver.plans import Plan, plans


class Calls(nn.Module):
    def __init__(self, functions: dict[str, Callable[[Tensor], Tensor]], *layers: nn.Module) -> None:
        super().__init__()
        self.functions, self.layers = functions, nn.ModuleList(layers)
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(x) for function in self.functions.values())


def in_bands(captured: Captured, bands: int) -> Schedule:
    """Return a schedule that computes each operator by itself, in so many bands of frames of one sample."""
    segments = (
        Segment(i, i + 1, Cut(1, bands if one.rows else 1) if one.rows else Cut(captured.samples, 1))
        for i, one in enumerate(captured.operators)
    )
    return Schedule(CostedGraph(captured, solver_graph(captured)), Plan(0, 0.0, tuple(segments)))


def check(model: Calls, *xs: Tensor) -> Captured:
    """Check a model in bands of frames, and of rows of all frames, against float64; return its graph of frames."""
    captured, of_rows = (capture(model, (xs[0],), puts_rows_first=puts_rows_first) for puts_rows_first in (False, True))
    for x in xs:
        with torch.no_grad():
            expected, torchs = model.double()(x.double()), model.float()(x)
        for graph, bands in ((captured, 1), (captured, 2), (captured, 7), (of_rows, 1), (of_rows, 3)):
            found = in_bands(graph, bands).run((x,))
            for name, own, exact, of_torch in zip(model.functions, found, expected, torchs, strict=True):
                torch.testing.assert_close(
                    own.double(), exact, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                )
                assert own.is_contiguous() or not of_torch.is_contiguous(), name
    assert len(barriers(captured)) or barriers(of_rows) <= VIEWS_OF_ROWS
    return captured


VIEWS_OF_ROWS = {"transpose", "permute", "contiguous"}


def barriers(captured: Captured) -> set[str]:
    targets = (str(one.target).split(".") for one in captured.operators if isinstance(one, Barrier))
    return {names[min(1, len(names) - 1)] for names in targets}


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sum": lambda x: x + x.flip(1),
    "line": lambda x: 0.5 * x + 2,
    "a frame of constants": lambda x: x * torch.linspace(1, 2, 30).view(6, 5),
    "constants of frames": lambda x: x * torch.linspace(1, 2, 7).view(7, 1, 1),
    "scaled channels": lambda x: x * x.mean((2, 3, 4), keepdim=True),
    "norm of channels": lambda x: F.normalize(x, dim=1),
    "mean of channels": lambda x: x * x.square().mean(1, keepdim=True).rsqrt(),
    "largest channel": lambda x: x - x.amax(1, keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "zeros around": lambda x: F.pad(x, (1, 0, 2, 1, 2, 1)),
    "replicated": lambda x: F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"),
    "reflected": lambda x: F.pad(x, (1, 2, 0, 1, 3, 2), mode="reflect"),
    "channels and frames": lambda x: torch.cat((x[:, 1:3, 2:], torch.cat((x, x), 1)[:, 7:9, ::2]), 2),
    "the first again": lambda x: torch.cat((x[:, :, :1], x[:, :, :1], x, x[:, :, -1:]), 2),
    "rows and columns": lambda x: F.silu(x[:, :, :, 1:-1, ::2]),
    "chunks of frames": lambda x: torch.cat(x.chunk(3, 2)[::-1], 2),
    "repeated": lambda x: x[:, :, 3:4].repeat(1, 1, 4, 1, 1),
    "expanded": lambda x: F.silu(x[:, :, 3:4].expand(-1, -1, 5, -1, -1)),
    "nearest": lambda x: F.interpolate(x, scale_factor=(2.0, 2.0, 1.0)),
    "nearest of a size": lambda x: F.interpolate(x, size=(5, 7, 9), mode="nearest-exact"),
    "trilinear": lambda x: F.interpolate(x, size=(11, 9, 5), mode="trilinear"),
    "aligned": lambda x: F.interpolate(x, size=(4, 6, 8), mode="trilinear", align_corners=True),
    "max pool": lambda x: F.max_pool3d(x, 3, 2, 1),
    "dilated max pool": lambda x: F.max_pool3d(x, 2, 1, 1, dilation=(2, 1, 1)),
    "average pool": lambda x: F.avg_pool3d(x, (3, 2, 2), (2, 1, 2), (1, 0, 1), count_include_pad=False),
    "average pool of many frames": lambda x: F.avg_pool3d(x, (6, 1, 1), 1, (3, 0, 0)),
    "adaptive pool": lambda x: F.adaptive_avg_pool3d(x, (7, 1, 1)),
    "group norm": lambda x: F.silu(F.group_norm(x, 2)),
    "instance norm": F.instance_norm,
}


def test_operators_in_bands_of_frames() -> None:
    """All in one graph: capturing takes most of the time."""
    x = torch.randn(2, 6, 7, 6, 5)
    captured = check(Calls(OPERATORS), x, x.contiguous(memory_format=torch.channels_last_3d))
    assert barriers(captured) == {"flip"}
    assert barriers(capture(Calls(OPERATORS), (x,), puts_rows_first=True)) <= {"flip", *VIEWS_OF_ROWS}


def test_bits_of_a_mean_do_not_depend_on_the_bands() -> None:
    """A band of three frames is as large as the window, but the whole is not."""
    x = torch.randn(1, 4, 12, 3, 3)
    captured = capture(Calls({"pool": lambda x: F.avg_pool3d(x, 3)}), (x,))
    (whole,), (in_four,) = (in_bands(captured, bands).run((x,)) for bands in (1, 4))
    assert torch.equal(whole, in_four)


class Loop(nn.Module):
    """Frames one after another, each convolution with the two before, as decoders of video do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(4, 16, 3, padding=(0, 1, 1)), nn.Conv3d(16, 16, 3, padding=(0, 1, 1))
        self.last = nn.Conv3d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        before, every = [x[:, :, :1].repeat(1, 1, 2, 1, 1), None], []
        for frames in x.split([1, *[4] * (x.shape[2] // 4)], 2):
            y = torch.cat((before[0], frames), 2)
            z = F.normalize(F.silu(self.first(y)), dim=1)
            clip = torch.cat((z[:, :, :1].repeat(1, 1, 2, 1, 1) if before[1] is None else before[1], z), 2)
            before = [y[:, :, -2:], clip[:, :, -2:]]
            every.append(self.last(F.silu(self.second(clip))))
        return torch.cat(every, 2)


def test_rows_of_all_frames_of_an_unrolled_loop_are_in_one_segment() -> None:
    model, x = Loop().eval(), torch.randn(1, 4, 9, 40, 6)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
    needed = []
    for puts_rows_first in (False, True):
        captured = capture(model, (x,), puts_rows_first=puts_rows_first)
        costed = CostedGraph(captured, solver_graph(captured))
        schedule = Schedule(costed, plans(costed.graph)[0], limit_bytes=0)
        needed.append(schedule.needed_bytes)
        torch.testing.assert_close(schedule.run((x,)).double(), expected, rtol=1e-4, atol=1e-5)
    assert needed[1] < 0.5 * needed[0]


def test_only_graphs_of_volumes_load_what_volumes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """When they are captured: the imports of modules are a contract of ``make lint``."""
    monkeypatch.setitem(sys.modules, "mucudnn.graph.video.rewrite", None)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PixelShuffle(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    capture(nn.Sequential(*layers, nn.Linear(2, 4)).eval(), (torch.randn(1, 3, 8, 8),))
    with pytest.raises(ImportError):
        capture(nn.Conv3d(3, 8, 3).eval(), (torch.randn(1, 3, 4, 8, 8),))


def test_what_is_not_in_frames_is_a_barrier() -> None:
    model = Calls(
        {
            "circular": lambda x: F.silu(F.pad(x, (1, 1, 0, 0, 1, 1), mode="circular")),
            "attention": lambda x: F.scaled_dot_product_attention(*(x.flatten(3).transpose(1, 3),) * 3),
            "other samples": lambda x: x * x.flip(0),
            "a frame": lambda x: F.silu(x[:, :, 2]).mean((2, 3)),
            "frames in channels": lambda x: F.silu(x.flatten(1, 2)) * 2,
            "behind constants": lambda x: F.silu(torch.cat((torch.linspace(0, 1, 120).view(2, 1, 5, 4, 3), x), 1)),
        }
    )
    assert "scaled_dot_product_attention" in barriers(check(model, torch.randn(2, 4, 5, 4, 3)))


def test_what_keeps_frames_apart_runs_in_bands_of_frames() -> None:
    """As in diffusers' ``WanAttentionBlock``, with its convolutions, or with linear layers of sequences of pixels."""
    qkv, out, norm = nn.Conv2d(4, 12, 1), nn.Conv2d(4, 4, 1), nn.LayerNorm(4)
    heads, weights = nn.Linear(4, 24), nn.Parameter(torch.randn(3, 12, 12))

    def images(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)

    def clips(y: Tensor, x: Tensor) -> Tensor:
        return y.unflatten(0, (len(x), -1)).transpose(1, 2)

    def attention(x: Tensor) -> Tensor:
        y = images(x)
        q, k, v = qkv(y).flatten(2).unsqueeze(1).transpose(2, 3).contiguous().chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).reshape(y.shape)
        return x + clips(out(y), x)

    def by_heads(x: Tensor) -> Tensor:
        y = images(x)
        pixels = heads(norm(y.flatten(2).transpose(1, 2)))
        q, k, v = pixels.unflatten(2, (3, 2, 4)).transpose(1, 3).unbind(2)
        pixels = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.relu(clips(pixels[..., 2:6].transpose(1, 2).reshape(y.shape), x))

    def with_scores(x: Tensor) -> Tensor:
        y = images(x).flatten(2)
        y = (y.transpose(1, 2) @ y).softmax(-1) @ y.transpose(1, 2)
        return F.relu(clips(y.transpose(1, 2).reshape(-1, *x.shape[1:2], *x.shape[3:]), x))

    together = {"attention": attention, "by heads": by_heads, "with scores": with_scores}
    captured = check(Calls(together, qkv, out, norm, heads), torch.randn(2, 4, 5, 4, 3))
    assert barriers(captured) == set()
    assert [type(one) for one in captured.operators].count(FrameByFrame) == len(together)

    def among_frames(x: Tensor) -> Tensor:
        y = images(x).flatten(2)
        return clips(y.transpose(0, 2).softmax(2).transpose(0, 2).reshape(images(x).shape), x)

    def weighted(x: Tensor) -> Tensor:
        y = images(x).flatten(2)
        return clips((y * weights[:1].sum() + y.mean(0)).reshape(images(x).shape), x)

    others = Calls({"among frames": among_frames, "weighted": weighted}, nn.ParameterList([weights]))
    as_many_pixels_as_frames = torch.randn(2, 4, 5, 5, 2)
    assert not any(isinstance(one, FrameByFrame) for one in check(others, as_many_pixels_as_frames).operators)


def test_convolutions_take_causal_padding_in() -> None:
    x = torch.randn(2, 4, 6, 5, 7)
    convolution = nn.Conv3d(4, 8, 3)
    strided = nn.Conv3d(4, 8, (3, 1, 1), (2, 1, 1), padding=(1, 0, 0))
    model = Calls(
        {
            "causal": lambda x: convolution(F.pad(x, (1, 1, 1, 1, 2, 0))),
            "more before": lambda x: F.relu(strided(F.pad(x, (0, 0, 0, 0, 3, 1)))),
        },
        *(convolution, strided),
    )
    operators = check(model, x).operators
    paddings = [one.problem.padding for one in operators if isinstance(one, Convolution)]
    assert paddings == [(2, 1, 1), (4, 0, 0)]
    assert not any(isinstance(one, Padding) for one in operators)
    kept = Calls(
        {
            "more behind": lambda x: convolution(F.pad(x, (1, 1, 1, 1, 0, 2))),
            "another value": lambda x: convolution(F.pad(x, (1, 1, 1, 1, 2, 0), value=1.0)),
            "columns of one side": lambda x: convolution(F.pad(x, (0, 2, 1, 1, 2, 0))),
            "read twice": partial(_read_twice, convolution),
        },
        convolution,
    )
    assert sum(isinstance(one, Padding) for one in check(kept, x).operators) == 4


def _read_twice(convolution: nn.Module, x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1, 1, 1, 2, 0))
    return convolution(padded) + padded[:, :1, 2:, 1:-1, 1:-1]


def test_convolutions() -> None:
    layers = nn.ModuleList(
        [
            nn.Conv3d(4, 6, 3, padding="same", dilation=(1, 2, 1)),
            nn.Conv3d(4, 4, (2, 3, 3), (2, 1, 2), (1, 0, 1), groups=4),
            nn.Conv3d(4, 3, (4, 1, 1), padding=(6, 0, 0)),
            nn.ConvTranspose3d(4, 5, 3, 2, 1, (1, 0, 1)),
            nn.Sequential(nn.Conv3d(4, 8, 1), nn.BatchNorm3d(8), nn.ReLU()),
            nn.Sequential(nn.BatchNorm3d(4), nn.SiLU()),
        ]
    )
    captured = check(Calls({str(layer): layer for layer in layers}, layers), torch.randn(2, 4, 5, 6, 7))
    assert not barriers(captured)


def test_one_frame_of_a_clip_is_an_image_in_bands() -> None:
    convolution = nn.Conv3d(4, 4, 3, padding=1)
    model = Calls({"alone": partial(_first_frame_alone, convolution)}, convolution)
    captured = check(model, torch.randn(2, 4, 5, 6, 7))
    assert not barriers(captured)
    dimensions = [one.problem.is_volume for one in captured.operators if isinstance(one, Convolution)]
    assert sorted(dimensions) == [False, True]


def _first_frame_alone(convolution: nn.Module, x: Tensor) -> Tensor:
    return torch.cat((F.silu(convolution(x[:, :, :1])), convolution(x[:, :, 1:])), 2)


class Upsampling(nn.Module):
    """Frames as a batch of images, as video decoders resize and convolve them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, d, h, w = x.shape
        y = x.permute(0, 2, 1, 3, 4).reshape(n * d, c, h, w)
        y = F.interpolate(y.float(), scale_factor=(2.0, 2.0), mode="nearest-exact").type_as(y)
        y = F.silu(self.conv(F.pad(F.normalize(y, dim=1) * torch.ones(4, 1, 1), (0, 0, 1, 1))))
        return y.view(n, d, *y.shape[1:]).transpose(1, 2)


def _normed_last(x: Tensor) -> Tensor:
    y = x.movedim(1, -1)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.linspace(1, 2, 4)
    return y.movedim(-1, 1) + x


def _first_alone(x: Tensor) -> Tensor:
    first = F.interpolate(x[:, :, 0], scale_factor=2.0)[:, :, None]
    return torch.cat((first, F.interpolate(x[:, :, 1:], scale_factor=(1.0, 2.0, 2.0))), 2)


def test_views_of_frames() -> None:
    upsampling, x = Upsampling(), torch.randn(2, 4, 3, 6, 5)
    functions = {"batch": upsampling, "last": _normed_last, "first": _first_alone}
    assert not barriers(check(Calls(functions, upsampling), x))
    others = {
        "mixed": lambda x: (x.permute(0, 2, 1, 3, 4) + x.flip(0)[:, :3, :1]).permute(0, 2, 1, 3, 4),
        "samples": lambda x: F.silu(x.transpose(0, 2)) * torch.linspace(1, 2, 3).view(3, 1, 1, 1, 1),
        "sum over frames": lambda x: x.permute(0, 2, 1, 3, 4).flatten(0, 1).sum(0, keepdim=True),
        "group norm": lambda x: F.group_norm(x.permute(0, 2, 1, 3, 4).flatten(0, 1), 2),
        "a constant of frames": lambda x: x.transpose(1, 2).flatten(0, 1) * torch.linspace(1, 2, 6).view(6, 1, 1, 1),
        "shuffled channels": lambda x: F.relu(_exchanged_pairs(F.silu(x.transpose(1, 2).flatten(0, 1)))),
        "only a view": lambda x: F.relu(x).permute(0, 2, 3, 4, 1).permute(0, 4, 1, 2, 3),
    }
    check(Calls(others), x)


def _in_space_and_time(x: Tensor, t: int, h: int, w: int) -> Tensor:
    n, _, *size = x.shape
    split = x.reshape(n, -1, t, h, w, *size).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return split.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _frames_of_channels(x: Tensor) -> Tensor:
    n, c, d, *size = x.shape
    split = x.reshape(n, 2, c // 2, d, *size)
    return torch.stack((split[:, 0], split[:, 1]), 3).reshape(n, c // 2, 2 * d, *size)


def _columns_first(x: Tensor) -> Tensor:
    n, c, d, h, w = x.shape
    return x.reshape(n, 2, c // 4, 2, d, h, w).permute(0, 2, 4, 3, 5, 6, 1).reshape(n, c // 4, 2 * d, h, 2 * w)


def _shuffled_channels(x: Tensor) -> Tensor:
    n, c, *size = x.shape
    return x.view(n, 4, c // 4, *size).transpose(1, 2).reshape(x.shape)


def test_channels_that_become_frames_rows_and_columns() -> None:
    x = torch.randn(2, 24, 5, 4, 3)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "space and time": lambda x: F.silu(_in_space_and_time(x, 2, 3, 2)[:, :, 1:]),
        "all channels": lambda x: F.silu(_in_space_and_time(x, 6, 2, 2)),
        "space": lambda x: F.silu(_in_space_and_time(x, 1, 2, 2)),
        "frames": lambda x: F.silu(_frames_of_channels(x)),
        "frames and columns": lambda x: F.silu(_columns_first(x)),
        "among channels": lambda x: F.silu(_shuffled_channels(x)),
    }
    captured = check(Calls(functions), x, x.contiguous(memory_format=torch.channels_last_3d))
    assert not barriers(captured)
    assert sum(isinstance(one, DepthToSpace) for one in captured.operators) == 6
    others: dict[str, Callable[[Tensor], Tensor]] = {
        "space to depth": lambda x: F.silu(x.view(2, 24, 5, 2, 2, 3).transpose(2, 3).reshape(2, 48, 5, 2, 3)),
        "channels inside": lambda x: F.silu(x.view(2, 6, 4, 5, 12).transpose(2, 3).reshape(2, 6, 5, 12, 4)),
        "columns first": lambda x: F.silu(x.view(2, 12, 2, 5, 4, 3).permute(0, 1, 3, 4, 2, 5).reshape(2, 12, 5, 4, 6)),
        "reversed": lambda x: torch.stack([*x.view(2, 2, 12, 5, 4, 3).unbind(1)][::-1], 3).reshape(2, 12, 10, 4, 3),
    }
    check(Calls(others), x)
    image = torch.randn(2, 8, 6, 5)
    pixels = Calls({"pixel shuffle": lambda x: F.relu(_rows_and_columns(x)), "channels": _shuffled_channels})
    of_images = check(pixels, image, image.contiguous(memory_format=torch.channels_last))
    assert not barriers(of_images)
    assert [type(one) for one in of_images.operators if isinstance(one, (DepthToSpace, Shuffle))] == [
        Shuffle,
        DepthToSpace,
    ]


def _exchanged_pairs(x: Tensor) -> Tensor:
    return x.view(len(x), 2, 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape)


def _rows_and_columns(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // 4, 2 * h, 2 * w)


class Cached(nn.Module):
    """A model whose first call makes what later ones find."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.conv, self.counts = nn.Conv3d(2, 3, 3), counts
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.caches = getattr(self, "caches", 0) + 1 if self.counts else 1
        return self.conv(x)


def test_what_the_first_call_caches_is_no_change() -> None:
    x = torch.randn(1, 2, 4, 4, 4)
    capture(Cached(counts=False), (x,))
    with pytest.raises(NotCapturedError, match="a call changes the model: caches has changed"):
        capture(Cached(counts=True), (x,))
