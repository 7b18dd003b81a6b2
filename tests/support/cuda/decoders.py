"""Decoders of images: first call, later calls and memory, by PyTorch, by mucudnn, in bands and in tiles.

python -m support.cuda.decoders PART --out FOLDER [--device cpu] [--side 8] [--width 32]

``run.sh`` runs the parts on a GPU. Contestants get ready one after the other, and each row is written at once; in the
end all are timed in turns, and their rows written again, with these samples.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.cuda.either_device import captured
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.results.reading import Header
from mucudnn.bench.results.writing import Row, open_folder
from mucudnn.bench.sources.networks import large_images
from mucudnn.bench.sources.networks.video import QwenImageDecoder
from mucudnn.bench.suites.shared.timing import time_in_turns, with_samples
from mucudnn.core.config import Config
from mucudnn.core.errors import CANDIDATE_ERRORS, InfeasibleError, first_line
from mucudnn.graph.model import BandedModel
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.measuring.clocks import wall_clock
from mucudnn.measuring.turns import Rounds, Timer
from mucudnn.running.devices import current_environment

Call = Callable[[], Tensor]
LIMIT = "256MiB"
TUNING: dict[str, Any] = {"confirm": False, "time_limit": "1s"}
ROUNDS = Rounds(5, 25, 5.0)


def with_benchmark(call: Call) -> Tensor:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        return call()
    finally:
        torch.backends.cudnn.benchmark = before


def in_tiles(model: nn.Module, z: Tensor, side: int) -> Tensor:
    """Decode tiles of side x side latents that overlap by a quarter, and blend them, as diffusers' ``tiled_decode``."""
    step, margin, kept = side * 3 // 4, 8 * side // 4, 8 * side * 3 // 4
    shares = torch.arange(margin, device=z.device, dtype=z.dtype) / margin
    above: list[Tensor] = []
    rows = []
    for i in range(0, z.shape[2], step):
        tiles = [model(z[:, :, i : i + side, j : j + side]) for j in range(0, z.shape[3], step)]
        for index, tile in enumerate(tiles):
            if above:
                size = min(margin, above[index].shape[2], tile.shape[2])
                share = shares[:size, None]
                tile[:, :, :size] = above[index][:, :, -size:] * (1 - share) + tile[:, :, :size] * share
            if index > 0:
                size = min(margin, tiles[index - 1].shape[3], tile.shape[3])
                share = shares[:size]
                tile[..., :size] = tiles[index - 1][..., -size:] * (1 - share) + tile[..., :size] * share
        above = tiles
        rows.append(torch.cat([tile[:, :, :kept, :kept] for tile in tiles], dim=3))
    return torch.cat(rows, dim=2)


def as_graph(model: nn.Module, x: Tensor, budget: int) -> nn.Module:
    """Return the model in bands within the budget, or within the smallest that there is."""
    config = Config(memory_budget=budget, **TUNING)
    try:
        return mucudnn.optimize(model, x, config, progress=False)
    except InfeasibleError as error:
        return mucudnn.optimize(model, x, replace(config, memory_budget=error.smallest_feasible_bytes), progress=False)


def replayed(model: nn.Module, x: Tensor, device: str) -> Call:
    y = torch.empty_like(model(x))
    replay = captured(lambda: y.copy_(model(x)), device)

    def call() -> Tensor:
        replay()
        return y

    return call


class Decoding:
    """A decoder with an input; ``contestants`` of a part are functions that return the call to time.

    torch_peak_bytes: measured with the first contestant, which is PyTorch. fitted: the model in bands, once it is.
    """

    def __init__(self, part: str, device: str, side: int, width: int | None) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        if part == "clip":
            model: nn.Module = QwenImageDecoder() if width is None else QwenImageDecoder(width)
            shape: tuple[int, ...] = (1, 16, 1, side, side)
        else:
            widths = large_images._WIDTHS if width is None else (width,) * 4
            with mock.patch.object(large_images, "_WIDTHS", widths):
                model = large_images.VAEDecoder()
            shape = 1, 4, side, side
        self.part, self.device, self.side = part, device, side
        self.model = model.to(device, dtype).eval()
        self.x = torch.randn(shape).to(device, dtype)
        self.torch_peak_bytes = 0
        self.fitted: nn.Module | None = None

    def contestants(self) -> dict[str, Callable[[], Call]]:
        run = partial(self.model, self.x)
        torchs: dict[str, Callable[[], Call]] = {"torch": lambda: run}
        benchmarked: dict[str, Callable[[], Call]] = {"torch-benchmark": lambda: partial(with_benchmark, run)}
        if self.part == "limit":
            return torchs | benchmarked | {"mucudnn": self.limited}
        if self.part == "bands":
            tiled = partial(in_tiles, self.model, self.x, self.side // 2)
            return torchs | {"mucudnn-bands": self.banded, "tiles": lambda: tiled, "mucudnn-graph": self.graph}
        return torchs | benchmarked | {"mucudnn-slices": self.sliced}

    def limited(self) -> Call:
        config = Config(operations="forward", workspace_limit=LIMIT, **TUNING)
        return partial(mucudnn.optimize(copy.deepcopy(self.model), self.x, config, progress=False), self.x)

    def banded(self) -> Call:
        self.fitted = as_graph(self.model, self.x, self.torch_peak_bytes // 4)
        return partial(self.fitted, self.x)

    def graph(self) -> Call:
        assert self.fitted is not None
        return replayed(self.fitted, self.x, self.device)

    def sliced(self) -> Call:
        return partial(as_graph(self.model, self.x, self.torch_peak_bytes), self.x)


def relative_difference(y: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(y.double() - expected.double()) / torch.linalg.vector_norm(expected.double()))


def measure(decoding: Decoding, out: Path, rounds: Rounds) -> None:
    """Write a row for each contestant: seconds until ready, of the first call and of later ones, bytes, difference.

    Bytes are those of a call, beside parameters, input and result.
    """
    clock, device, x = wall_clock(decoding.device), decoding.device, decoding.x
    settings = {"side": decoding.side, "dtype": str(x.dtype), "workspace_limit": LIMIT, "rounds": rounds.most}
    subject = {"network": type(decoding.model).__name__, "batch_size": 1}
    header = Header(
        *(f"decoder-{decoding.part}", subject["network"], settings, current_environment(device)),
        subject_columns=(*subject,),
        wanted=1,
    )
    expected: Tensor | None = None
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    with open_folder(out, header) as folder, torch.no_grad():
        nn.Conv2d(1, 1, 3, device=device, dtype=x.dtype)(x[:1, :1].reshape(1, 1, *x.shape[-2:]))  # loads libraries
        for name, make_ready in decoding.contestants().items():
            try:
                begun_s = clock.now()
                call = make_ready()
                ready_s = clock.now() - begun_s
                first_s = clock.time(call, 1)
                y, peak = call(), None
                if name != "mucudnn-graph":  # whose workspace was allocated when it was captured
                    mucudnn.release_workspaces()
                    peak = peak_allocated_bytes(call, device, in_blocks=False) - y.nbytes
            except (*CANDIDATE_ERRORS, mucudnn.MucudnnError) as error:
                rows[name] = Row(subject, name, failure=first_line(error))
            else:
                expected = y.clone() if expected is None else expected
                decoding.torch_peak_bytes = decoding.torch_peak_bytes or peak or 0
                more = {
                    **{"ready_after_s": ready_s, "first_s": first_s, "peak_bytes": peak},
                    "relative_difference": relative_difference(y, expected),
                    "largest_difference": float((y - expected).abs().max()),
                    "is_graph": isinstance(getattr(call, "func", None), BandedModel),
                }
                rows[name], calls[name] = Row(subject, name, [clock.time(call, 1)], more=more), call
            folder.add([rows[name]])
        timers = {name: Timer(call, clock, clock.every_round) for name, call in calls.items()}
        time_in_turns([*timers.values()], rounds)
        rows |= {name: with_samples(rows[name], timer) for name, timer in timers.items()}
        folder.add([*rows.values()])
        folder.write_summary()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("part", choices=("limit", "bands", "clip"))
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--side", type=int, default=128, help="height and width of the latent")
    made.add_argument("--width", type=int, help="channels, by default those of the model")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    torch.manual_seed(0)
    warnings.simplefilter("default")
    measure(Decoding(given.part, given.device, given.side, given.width), given.out, ROUNDS)


if __name__ == "__main__":
    main()
