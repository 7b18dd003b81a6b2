"""Train a residual network in a share of the memory that a step takes. Run: python train_within.py [share]"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mucudnn
from mucudnn.kernels.memory import peak_allocated_bytes


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        return F.relu(x + self.norms[1](self.convs[1](y)))


def main(share: float = 0.6, size: int = 32, steps: int = 20, limit: str = "5s") -> None:
    torch.manual_seed(0)
    patterns = torch.randn(10, 3, 32, 32)
    blocks = (Block(32) for _ in range(3))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def loss_of_noisy_images(model: nn.Module) -> Tensor:
        labels = torch.randint(10, (size,))
        return F.cross_entropy(model(patterns[labels] + torch.randn(size, 3, 32, 32)), labels)

    def peak_mib(model: nn.Module) -> float:
        loss_of_noisy_images(model).backward()  # makes the gradients, beside which a step is counted
        return peak_allocated_bytes(lambda: loss_of_noisy_images(model).backward()) / 2**20

    without = peak_mib(model)
    config = mucudnn.Config(
        memory_budget=f"{share * without:.0f}MiB", workspace_limit="2MiB", time_limit=limit, confirm=False
    )
    model = mucudnn.optimize(model, patterns[torch.randint(10, (size,))], config)  # in train()
    sys.stdout.write(f"{mucudnn.report(model)}\n")
    sys.stdout.write(f"peak of a step: {without:.1f} MiB without a budget, {peak_mib(model):.1f} MiB within\n")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of_noisy_images(model)
        loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            sys.stdout.write(f"loss of step {step + 1}: {loss.item():.2f}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("share", type=float, nargs="?", default=0.6, help="of the memory without a budget")
    main(parser.parse_args().share)
