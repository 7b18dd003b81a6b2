"""A small net as tuning leaves it, and a machine on which its steps take known seconds.

The clock moves only where a convolution or a step is told to take time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.clock.machine import FakeClock
from torch import Tensor, nn

import mucudnn
from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.problem import Operation
from mucudnn.core.records import Configuration, Measurement, MicroConfig
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.optimizing.applied import put_in
from mucudnn.optimizing.confirm import Confirmation, confirm_model
from mucudnn.running import operators
from mucudnn.running.dispatcher import torchs_kernel
from mucudnn.tuning.trace import trace

N = 2
X = torch.linspace(-1, 1, N * 3 * 8 * 8).reshape(N, 3, 8, 8)
ASKED = Config(confirm=True, workspace_limit=None, keep_heap=False)  # real page faults do not count here
REST_S = 0.01  # of a step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.normal, self.drop = nn.BatchNorm2d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.second(self.normal(self.first(x)).relu()))  # type: ignore[no-any-return]


class Machine:
    """Seconds that calls take by the clock: of torch's own for each operation, of ours for a module's filter."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.torchs_s, self.ours_s = 0.002, {4: 0.001, 3: 0.001}  # by input channels
        self.rest_s = {True: REST_S, False: REST_S}


def made_up_machine(monkeypatch: pytest.MonkeyPatch, clock: FakeClock | None = None) -> Machine:
    clock = clock or FakeClock()
    found = Machine(clock)
    run_known = operators.run_known

    def slow(executables: Any, operation: Operation, x: Tensor, *rest: Any) -> Any:
        clock.advance(found.ours_s[x.shape[1]])
        return run_known(executables, operation, x, *rest)

    def slow_kernel(name: str, device_type: str) -> Callable[..., Any]:
        kernel = torchs_kernel(name, device_type)

        def call(*arguments: Any) -> Any:
            clock.advance(found.torchs_s * (1 if name == "convolution" else sum(arguments[-1][:2])))
            return kernel(*arguments)

        return call

    monkeypatch.setattr(operators, "run_known", slow)
    monkeypatch.setattr("mucudnn.optimizing.steps.torchs_kernel", slow_kernel)
    monkeypatch.setattr("mucudnn.optimizing.steps.time.perf_counter", clock.now)
    monkeypatch.setattr("mucudnn.optimizing.confirm.RECORD_S", 0.0)  # torch's take none where none is noted
    monkeypatch.setattr("mucudnn.optimizing.confirm.wall_clock", lambda device_type: clock)
    forward = Net.forward

    def with_rest(net: Net, x: Tensor) -> Tensor:
        clock.advance(found.rest_s[getattr(net.first, "choices", None) is not None])
        return forward(net, x)

    monkeypatch.setattr(Net, "forward", with_rest)
    return found


def tuned_net(config: Config = ASKED, algorithm: str = "gemm", limit_bytes: int | None = None, x: Tensor = X) -> Net:
    """A net as tuning leaves it, all of it by one algorithm."""
    net, n = Net(), len(x)
    for call in trace(net, x):
        layer: Any = dict(net.named_modules())[call.name]
        layer.__class__ = mucudnn.Conv2d
        operations = (o for o in Operation if o is not Operation.BACKWARD_DATA or call.input_needs_gradient)
        chosen = Configuration((MicroConfig(algorithm, n),), 0.001, 0)
        own = Measurement(MicroConfig(TORCHS_OWN, n), 0.0, 0.002, 0, 1000, 0.0)
        problems = [call.problem.with_operation(operation) for operation in operations]
        tuned = [
            TunedProblem(p, n, chosen, 0.002, 0.001, 0.0, "", measurements=(own,), limit_bytes=limit_bytes)
            for p in problems
        ]
        put_in(layer, tuned, config)
    return net


def confirmed(net: nn.Module, config: Config = ASKED, x: Any = X, **given: Any) -> Confirmation | None:
    return confirm_model(
        net,
        x,
        config,
        lambda layer, tuned: put_in(layer, tuned, config),
        device_type="cpu",
        progress=given.pop("progress", lambda text, fraction: None),
        **given,
    )


def torchs(net: Net) -> set[tuple[str, Operation]]:
    return {(name, o.problem.operation) for name, o in mucudnn.report(net).layers if o.configuration.is_baseline}
