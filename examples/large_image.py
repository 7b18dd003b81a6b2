"""Denoise a large picture within a memory budget. Run: python large_image.py [pixels] [budget]

A small network learns in half a minute to remove noise from patches. Then it runs on a whole picture, as it is and in
bands of rows, and memory.png shows time against memory of every plan, beside PyTorch's (with matplotlib).
"""

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn

import mucudnn

NOISE = 0.2


def picture(height: int, width: int) -> Tensor:
    """Return rings and stripes, (1, 1, height, width), between 0 and 1."""
    y, x = torch.meshgrid(torch.linspace(-4, 4, height), torch.linspace(-4, 4, width), indexing="ij")
    return (0.5 + 0.25 * torch.sin(3 * (x * x + y * y).sqrt()) + 0.25 * torch.sign(torch.sin(2 * x + y)))[None, None]


def network(layers: int = 6, width: int = 32) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
    for _ in range(layers - 2):
        model.extend((nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()))
    return model.append(nn.Conv2d(width, 1, 3, padding=1))


def train(model: nn.Module, clean: Tensor, steps: int = 150) -> None:
    """Teach the model to predict the noise in patches of 32x32 pixels."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        top, left = (int(torch.randint(size - 32, ())) for size in clean.shape[2:])
        noise = NOISE * torch.randn(16, 1, 32, 32)
        loss = (model(clean[:, :, top : top + 32, left : left + 32] + noise) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def draw(found: Any, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    memory = [plan.memory_bytes / 2**20 for plan in found.front]
    axes.step(memory, [plan.time_s * 1e3 for plan in found.front], where="post", label="in bands, predicted")
    axes.plot(found.needed_bytes / 2**20, found.time_s * 1e3, "s", label="this budget, measured")
    if found.whole_run is not None:
        axes.plot(found.torch_bytes / 2**20, found.whole_run.baseline_s * 1e3, "o", label="PyTorch, measured")
    axes.set(xscale="log", xlabel="activations and workspace, MiB", ylabel="ms per call")
    axes.legend()
    figure.savefig(path)


def main(pixels: int = 768, budget: str = "12MiB", steps: int = 150) -> None:
    torch.manual_seed(0)
    clean = picture(pixels, pixels)
    model = network()
    train(model, clean, steps)
    noisy = clean + NOISE * torch.randn_like(clean)
    bands = mucudnn.optimize(model.eval(), noisy, mucudnn.Config(memory_budget=budget))
    with torch.no_grad():
        denoised, expected = noisy - bands(noisy), noisy - model(noisy)
    before, after = ((one - clean).square().mean().sqrt() for one in (noisy, denoised))
    sys.stdout.write(f"{mucudnn.report(bands)}\n")
    sys.stdout.write(f"error of the picture: {before:.3f} before, {after:.3f} after\n")
    sys.stdout.write(f"largest difference from the whole model: {(denoised - expected).abs().max():.1e}\n")
    try:
        draw(mucudnn.report(bands).memory[0], "memory.png")
    except ImportError:
        sys.stdout.write("no picture without matplotlib\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pixels", type=int, nargs="?", default=768, help="height and width of the picture")
    parser.add_argument("budget", nargs="?", default="12MiB", help="memory budget of a call")
    arguments = parser.parse_args()
    main(arguments.pixels, arguments.budget)
