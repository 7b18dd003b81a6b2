"""A clock that moves only when told to, and algorithms that move it by known costs: measuring becomes deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, Environment
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace
from mucudnn.kernels.torch_convolution import reference
from mucudnn.measuring.clocks import Clock
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import Machine

FORWARD = ConvProblem(Operation.FORWARD, c=2, h=3, w=3, k=2, r=1, s=1)
ENVIRONMENT = Environment("a device", "none", 1, "a torch", "a library", "nothing")


@dataclass(slots=True)
class FakeClock(Clock):
    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass(slots=True)
class TickingClock(Clock):
    """Each reading is one second after the last."""

    seconds: float = 0.0

    def now(self) -> float:
        self.seconds += 1.0
        return self.seconds


class Slow(nn.Module):
    """Lets 100 s pass, more of them on other ranks than 0, and is no convolution."""

    def __init__(self, clock: TickingClock) -> None:
        super().__init__()
        self.clock = clock

    def __deepcopy__(self, memo: object) -> Slow:
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.clock.seconds += 100 * (1 + (dist.get_rank() if dist.is_initialized() else 0))
        return x


@dataclass(slots=True)
class FakeAlgorithm(BaseAlgorithm):
    """Computes FORWARD right but for a factor ``1 + error``; a step takes ``step_s(micro-batch size)``."""

    name: str
    clock: FakeClock
    step_s: Callable[[int], float]
    setup_s: float = 0.0
    prepared_bytes: int = 0
    scratch_bytes_per_sample: int = 0
    internal_bytes_per_sample: int = 0
    error: float = 0.0
    unsupported: str | None = None
    unsupported_sizes: Sequence[int] = ()
    failing_sizes: Sequence[int] = ()
    version: int = 1
    deterministic: bool = True
    local: bool = True
    sizes_run: list[int] = field(default_factory=list)
    offsets_run: list[int] = field(default_factory=list)  # elements of x before the slice
    internals_asked: list[int] = field(default_factory=list)  # micro-batch sizes

    @property
    def source(self) -> str | None:
        """As of a library where the name has a colon."""
        return self.name.partition(":")[0] if ":" in self.name else None

    @property
    def is_torchs_own(self) -> bool:
        return self.name.startswith("native")

    def supports(self, problem: ConvProblem) -> str | None:
        return self.unsupported

    def is_local(self, problem: ConvProblem) -> bool:
        return self.local

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        return "not this size" if micro_batch_size in self.unsupported_sizes else None

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        return Workspace(self.prepared_bytes, self.scratch_bytes_per_sample * micro_batch_size)

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        self.internals_asked.append(micro_batch_size)
        return self.internal_bytes_per_sample * micro_batch_size

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        self.clock.advance(self.setup_s)

    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, *rest: Tensor) -> None:
        size = x.shape[0]
        self.sizes_run.append(size)
        self.offsets_run.append(int(x.storage_offset()))
        if size in self.failing_sizes:
            raise RuntimeError(f"out of memory at {size}\nand a stack trace")
        y.copy_(reference(problem, x, w, y).mul_(1 + self.error))
        self.clock.advance(self.step_s(size))

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        pass


def linear(seconds_per_sample: float, seconds_per_step: float = 0.0) -> Callable[[int], float]:
    return lambda size: seconds_per_step + seconds_per_sample * size


def fake_machine(
    clock: FakeClock, algorithms: Sequence[FakeAlgorithm], slowdown: Callable[[Configuration], float] = lambda _: 1.0
) -> Machine:
    """Whole runs take what the model says, times ``slowdown``; torch's own is the algorithm named native."""
    by_name = {algorithm.name: algorithm for algorithm in algorithms}

    def run(problem: ConvProblem, configuration: Configuration, operands: Operands, **_: bool) -> None:
        setups = sum(by_name[name].setup_s for name in configuration.algorithms)
        steps = sum(by_name[m.algorithm].step_s(m.micro_batch_size) for m in configuration.micro_configs)
        clock.advance((setups + steps) * slowdown(configuration))

    def run_torch(problem: ConvProblem, operands: Operands) -> None:
        clock.advance(by_name[TORCHS_OWN].step_s(operands.batch_size))

    return Machine(ENVIRONMENT, algorithms, clock=clock, whole_run=made_ready(run), run_torch=run_torch)


def made_ready(run: Callable[..., object]) -> Callable[..., Callable[[], object]]:
    """A machine's ``whole_run`` from a function that makes one."""
    return lambda *args, **kwargs: partial(run, *args, **kwargs)
