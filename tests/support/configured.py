"""Runs a configuration on given tensors: nothing is replaced where it fails."""

from __future__ import annotations

from torch import Tensor

from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Configuration
from mucudnn.running.devices import made_current
from mucudnn.running.executable import Executable


def run(
    problem: ConvProblem,
    configuration: Configuration,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    *,
    keeps_workspace: bool = True,
) -> None:
    """Compute a problem into the tensor that its operation writes; all are dense, in the problem's memory format."""
    with made_current(x.device):
        made = Executable.of(problem, configuration, device_type=x.device.type, keeps_workspace=keeps_workspace)
        made.build()
        made.execute(x, w, y, bias)
