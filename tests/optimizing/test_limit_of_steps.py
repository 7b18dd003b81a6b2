"""Within a limit, whole training steps take no more than their tensors and that: the kept workspace is counted, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from typing import cast

import pytest
import torch
from support.peaks import repeatable_step
from torch import Tensor, nn

from mucudnn.bench.suites.shared.step_costs import allocator_peak_bytes
from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.problem import Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.registry import algorithm
from mucudnn.optimizing.applied import put_in
from mucudnn.running.executable import BUFFER_BYTES
from mucudnn.running.modules import TunedModule, make_tunable
from mucudnn.tuning.trace import trace
from mucudnn.tuning.training_step import trace_step

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one layer": (lambda: nn.Conv2d(16, 32, 5, padding=2), (8, 16, 24, 24)),
    "a layer that is PyTorch's own alone": (
        lambda: nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 5, padding=2)),
        (4, 8, 20, 20),
    ),
    "layers of several kinds": (
        lambda: nn.Sequential(nn.Conv2d(4, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3, groups=3), nn.Conv2d(24, 8, 1)),
        (4, 4, 18, 18),
    ),
    "strided": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 7, stride=2, padding=3), nn.Conv2d(16, 16, 3, stride=2)),
        (4, 3, 40, 40),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.ConvTranspose2d(16, 8, 4, stride=2)),
        (4, 8, 24, 24),
    ),
}
OURS, TORCHS, TORCHS_PIECES = (("implicit-gemm", 0), ("native", 0), ("native", 2))  # with the micro-batch; 0: undivided
WAYS = {  # by operation, of the layers in turn
    "PyTorch's own dw": [(OURS, OURS, TORCHS)],
    "PyTorch's own dx and dw": [(OURS, TORCHS, TORCHS)],
    "PyTorch's own in pieces": [(OURS, OURS, TORCHS_PIECES)],
    "whole layers of PyTorch's own": [(OURS, OURS, OURS), (TORCHS, TORCHS, TORCHS)],
}


def tuned_by_hand(model: nn.Module, x: Tensor, way: str) -> int:
    """Put in choices, within the least limit that holds each of them. Returns that limit."""
    modules, turns = dict(model.named_modules()), cycle(WAYS[way])
    chosen: defaultdict[str, list[TunedProblem]] = defaultdict(list)
    for call in trace(model, x):
        for operation, (name, size) in zip(Operation, next(turns), strict=True):
            problem = call.problem_of(operation)
            fits = size == 0 or algorithm(name).supports_micro_batch(problem, size) is None
            n = size if size and fits else call.batch_size
            micro_configs = (MicroConfig(name, n),) * (call.batch_size // n)
            workspace = algorithm(name).workspace(problem, n)
            scratch = workspace.scratch_bytes + algorithm(name).internal_bytes(problem, n)
            configuration = Configuration(micro_configs, 1.0, workspace.prepared_bytes + scratch)
            chosen[call.name].append(TunedProblem(problem, call.batch_size, configuration, 1.0, 1.0, 0.0, "by hand"))
    configurations = [tuned.configuration for problems in chosen.values() for tuned in problems]
    limit = max(configuration.workspace_bytes for configuration in configurations)
    kept = max((one.workspace_bytes for one in configurations if not one.is_baseline), default=0)
    for name, problems in chosen.items():
        make_tunable(modules[name])
        put_in(cast(TunedModule, modules[name]), problems, Config(workspace_limit=limit), kept)
    return limit


@pytest.mark.parametrize("net", NETS)
def test_the_peak_of_a_step_is_that_of_its_tensors_and_the_limit(net: str) -> None:
    for way in WAYS:
        torch.manual_seed(0)
        made, shape = NETS[net]
        model, x = made(), torch.randn(shape)
        timeline = trace_step(model, x)
        tensors_bytes = timeline.peak_bytes - timeline.base_bytes  # parameters and x are there before
        limit = tuned_by_hand(model, x, way)
        peak_bytes = allocator_peak_bytes(repeatable_step(model, x))
        assert peak_bytes <= tensors_bytes + limit + BUFFER_BYTES, way  # on a multiple of which scratch begins
