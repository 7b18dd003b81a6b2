"""``run_in_bands``: the values of the whole image at every seam, within the bytes, from and to arrays and functions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import mucudnn
from mucudnn.bench.sources.networks.large_images import SegmentingUNet
from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError, InvalidInputError
from mucudnn.core.terminal import silent
from mucudnn.graph.windows import raster
from mucudnn.graph.windows.fixed_norms import UpToNorm
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.memory import peak_allocated_bytes


@pytest.fixture
def quick(tmp_path: Path) -> dict[str, Any]:
    if reason := loaded_build().why_not_compiled:
        pytest.skip(f"only compiled algorithms run bands in few bytes: {reason}")
    return {"database": tmp_path / "db.sqlite", "algorithms": ("implicit-gemm", "pointwise"), "time_limit": "50ms"}


class Strides(nn.Module):
    """Other strides, paddings, dilations and resizings in rows than in columns, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, (5, 3), stride=(2, 1), padding=(2, 3), dilation=(1, 2))
        self.second = nn.Conv2d(4, 4, (1, 5), stride=(1, 3), padding=(0, 2))
        self.up = nn.ConvTranspose2d(4, 4, (4, 3), stride=(2, 3), padding=(1, 0))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.up(self.second(F.pad(self.first(x), (2, 1, 1, 1), mode="reflect"))))
        return F.avg_pool2d(y, (3, 2), (1, 2), (1, 0), count_include_pad=False)


class Resized(nn.Module):
    """A super-resolution network: pixels from channels, and the image itself, interpolated."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        larger = F.interpolate(x, scale_factor=2, mode="bilinear")
        return F.pixel_shuffle(self.convolution(x), 2) + larger * F.interpolate(x, scale_factor=2)


class Normed(nn.Module):
    """Two norms over the whole image, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 4, 3, stride=2, padding=1)
        self.groups, self.instances = nn.GroupNorm(2, 6), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.silu(self.groups(self.first(x)))
        return {"out": torch.relu(self.instances(self.second(x)))}


def output_of(model: nn.Module, image: NDArray[Any]) -> NDArray[Any]:
    """Return the result of the whole image."""
    with torch.no_grad():
        y = model(torch.from_numpy(image)[None])
    return (y["out"] if isinstance(y, dict) else y)[0].numpy()


def image_of(*shape: int) -> NDArray[Any]:
    return np.random.default_rng(0).normal(2.0, 1.0, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("model", "shape", "budget", "passes"),
    [
        (SegmentingUNet(widths=(4, 8)), (3, 200, 328), "300KiB", 1),
        (Strides(), (1, 205, 333), "90KiB", 1),
        (Resized(), (1, 150, 170), "100KiB", 1),
        (Normed(), (1, 201, 260), "150KiB", 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_values_are_those_of_the_whole_image(
    model: nn.Module, shape: tuple[int, ...], budget: str, passes: int, quick: dict[str, Any]
) -> None:
    model, image = model.eval(), image_of(*shape)
    expected = output_of(model, image)
    config = Config(memory_budget=budget, **quick)
    result, rows, calls = np.zeros_like(expected), list[NDArray[Any]](), list[tuple[int, int]]()
    done = mucudnn.run_in_bands(model, image, result, config)
    assert done.passes == passes
    assert done.windows > 3
    assert min(one / other for one, other in zip(shape[1:], done.window, strict=True)) > 1  # cut in both directions
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)

    def source(first: int, last: int) -> Tensor:
        calls.append((first, last))
        return torch.from_numpy(image[:, first:last])

    def sink(first: int, part: NDArray[Any]) -> None:
        assert first == sum(part.shape[1] for part in rows)
        rows.append(part)

    mucudnn.run_in_bands(model, source, sink, Config(**quick, memory_budget="1MiB"), shape=shape)
    np.testing.assert_allclose(np.concatenate(rows, 1), expected, rtol=1e-4, atol=1e-5)
    assert {0, shape[1]} <= {row for call in calls for row in call}


@torch.no_grad()
def test_it_stays_within_the_budget(quick: dict[str, Any]) -> None:
    model, image = SegmentingUNet(widths=(4, 8)).eval(), image_of(3, 400, 328)
    config, result = Config(memory_budget="300KiB", **quick), np.zeros((2, 400, 328), np.float32)
    for source, sink in (image, result), (lambda first, last: image[:, first:last].copy(), lambda *_: None):
        plan = raster._planned(UpToNorm(model), image.shape, torch.float32, config, silent, has_rows=callable(source))
        mucudnn.release_workspaces()
        peak = peak_allocated_bytes(partial(raster._write, raster._parts(plan, source, 0, silent), plan, sink, 0))
        assert peak <= plan.needed_bytes <= 300 * 2**10


def test_it_goes_on_where_the_sink_stopped(quick: dict[str, Any]) -> None:
    model, image = SegmentingUNet(widths=(4, 8)).eval(), image_of(3, 200, 328)
    config, whole = Config(memory_budget="300KiB", **quick), np.zeros((2, 200, 328), np.float32)
    mucudnn.run_in_bands(model, image, whole, config)
    parts = list[NDArray[Any]]()

    def sink(first: int, rows: NDArray[Any]) -> None:
        if len(parts) == 2:
            raise KeyboardInterrupt
        parts.append(rows)

    with pytest.raises(KeyboardInterrupt):
        mucudnn.run_in_bands(model, image, sink, config)
    written = sum(part.shape[1] for part in parts)
    for first_row in (written, written - 3):  # a sink may have only some rows of a band
        again = np.zeros_like(whole)
        mucudnn.run_in_bands(model, image, again, config, first_row=first_row)
        assert not again[:, :first_row].any()
        np.testing.assert_allclose(again[:, first_row:], whole[:, first_row:], rtol=1e-4, atol=1e-5)


class Placed(nn.Module):
    """A model that knows where a pixel is, or sees the whole image."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.convolution, self.norm = kind, nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        if self.kind == "mean":
            return y * torch.sigmoid(y.mean((2, 3), keepdim=True))
        if self.kind == "coordinates":
            return y + torch.linspace(0, 1, y.shape[2]).view(-1, 1)
        if self.kind == "corners":
            return F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=True)
        if self.kind == "half":
            return y[:, :, y.shape[2] // 2 :]
        if self.kind == "function":
            return F.group_norm(y, 2)
        if self.kind == "pixel":
            return y.mean((2, 3))
        return self.norm(torch.relu(self.norm(y)))


def test_what_windows_cannot_compute_is_refused(quick: dict[str, Any]) -> None:
    image, config = image_of(1, 200, 300), Config(memory_budget="1MiB", **quick)
    of_image = "the result depends on (rows|columns) of the whole image, through "
    for kind, why in {
        "mean": of_image + "mean",
        "coordinates": of_image + "add",
        "corners": of_image + "upsample_bilinear2d",
        "half": of_image + "slice",
        "function": of_image + "group_norm",
        "pixel": of_image + "mean",
        "twice": "norm is called twice; give each call a norm of its own",
    }.items():
        with pytest.raises(InvalidInputError, match=why):
            mucudnn.run_in_bands(Placed(kind).eval(), image, print, config)


def test_wrong_arguments_are_refused(quick: dict[str, Any]) -> None:
    model, image = SegmentingUNet(widths=(4, 8)).eval(), image_of(3, 200, 328)
    result, config = np.zeros((2, 200, 328), np.float32), Config(memory_budget="1MiB", **quick)

    def refused(
        why: str, source: Any = image, sink: Any = result, config: Config = config, model: Any = model, **arguments: Any
    ) -> None:
        with pytest.raises(InvalidInputError, match=why):
            mucudnn.run_in_bands(model, source, sink, config, **arguments)

    refused("is in training mode", model=nn.Conv2d(3, 3, 3))
    refused("needs a memory budget", config=Config(**quick))
    refused("a function of first_row and last_row and shape=", source=print)
    refused("the source is 7; give an array of three dimensions or a function", source=7)
    refused(r"the source has \(3, 200, 328\); leave it out", shape=(1, 2, 3))
    refused(r"the sink has the shape \(1, 200, 328\); the result has \(2, 200, 328\)", sink=result[1:])
    refused("first_row is 201; it must be at most 200", first_row=201)
    refused(r"must be \(3, \d+, 328\)", source=lambda *_: image[:, :7], shape=image.shape)
    with pytest.raises(InfeasibleError, match="the memory budget is 10000B") as error:
        mucudnn.run_in_bands(model, image, result, Config(memory_budget=10_000, **quick))
    least = error.value.smallest_feasible_bytes
    assert least is not None
    within = Config(memory_budget=least, **quick)
    assert mucudnn.run_in_bands(model, image, result, within).needed_bytes <= least
