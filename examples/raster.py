"""Segment a raster that does not fit into memory, from one file to another. Run: python raster.py [pixels] [budget]

It writes a raster of noise and shapes (raster.npy), runs a U-Net on it in bands of rows, and leaves the scores of each
pixel in scores.npy. Interrupt it, or kill it, and start it again: it goes on where it stopped. With rasterio or
tifffile the source is a function that reads rows, and the sink one that writes them.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import mucudnn

CLASSES = 2


class Scores:
    """The file of the result, and beside it how many of its rows are written."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.done = path.with_suffix(".rows")
        is_new = not (path.exists() and self.done.exists())
        self.array = np.lib.format.open_memmap(path, "w+" if is_new else "r+", np.float32, shape if is_new else None)
        if is_new:
            self.done.write_text("0")

    @property
    def rows(self) -> int:
        return int(self.done.read_text())

    def __call__(self, first_row: int, rows: np.ndarray) -> None:
        self.array[:, first_row : first_row + rows.shape[1]] = rows
        self.array.flush()  # the rows before their number
        self.done.write_text(str(first_row + rows.shape[1]))


def write_raster(path: Path, pixels: int) -> None:
    """Write squares and noise, (3, pixels, pixels), some rows at a time."""
    raster = np.lib.format.open_memmap(path, "w+", np.float32, (3, pixels, pixels))
    random, columns = np.random.default_rng(0), np.arange(pixels)
    for first in range(0, pixels, 64):
        rows = np.arange(first, min(first + 64, pixels))
        squares = (rows[:, None] // 50 + columns // 50) % 2
        raster[:, first : rows[-1] + 1] = squares + random.standard_normal((3, len(rows), pixels), np.float32)


def network(width: int = 16) -> nn.Module:
    """Return a small network with the rows of a skip connection to wait for, with random weights."""
    torch.manual_seed(0)
    inner = nn.Sequential(
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    )

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Conv2d(3, width, 3, padding=1), inner
            self.last = nn.Conv2d(2 * width, CLASSES, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.first(x))
            return self.last(torch.cat((x, self.inner(x)), 1))

    return Network().eval()


def main(pixels: int = 4096, budget: str = "64MiB") -> None:
    source, model = Path("raster.npy"), network()
    if not source.exists() or np.load(source, mmap_mode="r").shape[1] != pixels:
        write_raster(source, pixels)
    raster = np.load(source, mmap_mode="r")
    scores = Scores(Path("scores.npy"), (CLASSES, pixels, pixels))
    sys.stdout.write(f"{scores.rows} of {pixels} rows are there\n")
    done = mucudnn.run_in_bands(model, raster, scores, mucudnn.Config(memory_budget=budget), first_row=scores.rows)
    sys.stdout.write(f"{done}\n")

    # Compare a part from the middle with the model, which sees 32 pixels more on each side
    top = left = pixels // 2
    part = torch.tensor(raster[:, top - 32 : top + 96, left - 32 : left + 96])[None]
    with torch.no_grad():
        expected = model(part)[0, :, 32:96, 32:96].numpy()
    difference = np.abs(scores.array[:, top : top + 64, left : left + 64] - expected).max()
    sys.stdout.write(f"largest difference from the model on a part of the raster: {difference:.1e}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pixels", type=int, nargs="?", default=4096, help="height and width of the raster")
    parser.add_argument("budget", nargs="?", default="64MiB", help="memory budget")
    arguments = parser.parse_args()
    main(arguments.pixels, arguments.budget)
