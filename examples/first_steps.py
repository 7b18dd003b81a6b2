"""The shortest way: optimize a small model, see what was chosen, and train as always. Run: python first_steps.py"""

import argparse
import sys

import torch
from torch import nn

import mucudnn

argparse.ArgumentParser(description=__doc__).parse_args()

model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2))
images = torch.randn(8, 3, 32, 32)

model = mucudnn.optimize(model, images, mucudnn.Config(workspace_limit="8MiB"))
sys.stdout.write(f"{mucudnn.report(model)}\n")

model(images).sum().backward()  # forward and both gradients run what was chosen
