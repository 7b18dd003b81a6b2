"""Models that commands are told by name: ``support.models_by_name:tiny``."""

from __future__ import annotations

from torch import nn


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten())


def trained() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 10, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(810, 10)),
    )
