"""Ways in which torch trains a model on several ranks, each a generator that yields the parameters after each step.

It yields after the steps at whose end all ranks are meant to have the same parameters: after all but a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SAMPLES, SIZE, CLASSES = 4, 10, 5  # of a rank's batch
STEPS, WARMUP_STEPS, PERIOD = 5, 2, 2

Steps = Iterator[Iterable[Tensor]]
Way = Callable[["Net"], Steps]
Forward = Callable[[nn.Module, Tensor, int], Tensor]  # of a model, images and the number of the step


class Net(nn.Module):
    """Three convolutions, one of which a step can do without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.last, self.aside = nn.Conv2d(8, 4, 3), nn.Conv2d(3, 4, 3)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor, all_of_it: bool = True) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)).relu())
        return self.head(y + self.aside(x) if all_of_it else y)  # type: ignore[no-any-return]


def batch(step: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank trains with in a step."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    x = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return x.to(like), torch.randint(CLASSES, (SAMPLES,), generator=generator).to(like.device)


def loss(wrapped: nn.Module, step: int, forward: Forward | None = None) -> Tensor:
    x, labels = batch(step, next(iter(wrapped.parameters())))
    return cross_entropy(wrapped(x) if forward is None else forward(wrapped, x, step), labels)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(
    wrapped: nn.Module, optimizer: torch.optim.Optimizer | None = None, forward: Forward | None = None
) -> Steps:
    optimizer = optimizer or sgd(wrapped)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(wrapped, step, forward).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield wrapped.parameters()


def ddp(**options: Any) -> Way:
    return lambda model: trained(DistributedDataParallel(model, **options))


def part_unused_on_one_rank(model: Net) -> Steps:
    """In every second step."""

    def forward(wrapped: nn.Module, x: Tensor, step: int) -> Tensor:
        y: Tensor = wrapped(x, all_of_it=dist.get_rank() == 0 or step % 2 == 0)
        return y

    yield from trained(DistributedDataParallel(model, find_unused_parameters=True), forward=forward)


def gradients_accumulated(model: Net) -> Steps:
    """Over two batches, of which only the second is communicated."""
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(wrapped)
    for step in range(STEPS):
        optimizer.zero_grad()
        with wrapped.no_sync():
            loss(wrapped, 2 * step).backward()  # type: ignore[no-untyped-call]
        loss(wrapped, 2 * step + 1).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield wrapped.parameters()


def with_a_hook(model: Net) -> Steps:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    yield from trained(wrapped)


def averaged_now_and_then(model: Net) -> Steps:
    """After some steps that communicate gradients each rank trains alone, and parameters are averaged each period."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # here: torch warns when it is imported

    wrapped = DistributedDataParallel(model)
    state = post_localSGD_hook.PostLocalSGDState(None, None, WARMUP_STEPS, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(sgd(wrapped), PeriodicModelAverager(PERIOD, WARMUP_STEPS))
    for step, parameters in enumerate(trained(wrapped, optimizer)):
        if step < WARMUP_STEPS or (step - WARMUP_STEPS) % PERIOD == 0:
            yield parameters


def zero(model: Net) -> Steps:
    """The optimizer's state is divided over the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: torch warns when it is imported

    wrapped = DistributedDataParallel(model)
    yield from trained(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9))


def parameters_sharded(model: Net) -> Steps:
    """By FSDP2: each convolution by itself, then the rest."""
    mesh = init_device_mesh(model.first.weight.device.type, (dist.get_world_size(),))
    for module in (model.first, model.last, model.aside, model):
        fully_shard(module, mesh=mesh)
    for parameters in trained(model):
        yield [parameter.full_tensor() for parameter in parameters]  # type: ignore[attr-defined]


def compiled_outside(model: Net) -> Steps:
    """The graph is divided where buckets end: with such small ones in front of every convolution."""
    torch._dynamo.reset()
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1):
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        yield from trained(cast(nn.Module, torch.compile(wrapped, backend="aot_eager")))


def compiled_inside(model: Net) -> Steps:
    torch._dynamo.reset()
    yield from trained(
        DistributedDataParallel(cast(nn.Module, torch.compile(model, backend="aot_eager", fullgraph=True)))
    )


def recomputed(use_reentrant: bool) -> Way:
    """Activations are not kept but computed again."""

    class Checkpointed(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.body, x.requires_grad_(), use_reentrant=use_reentrant)
            return y

    return lambda model: trained(DistributedDataParallel(Checkpointed(model)))


def joined_unevenly(model: Net) -> Steps:
    """The last rank has fewer batches in the first epoch, and none in the second."""
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(wrapped)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for batches in ((3, 2), (2, 0)):
        with Join([wrapped]):
            for step in range(batches[is_last]):
                optimizer.zero_grad()
                loss(wrapped, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        yield wrapped.parameters()


def normalized_together(model: Net) -> Steps:
    """By statistics of the batches of all ranks."""
    yield from trained(DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model)))


WAYS: Mapping[str, Way] = {
    "ddp": ddp(),
    "static_graph": ddp(static_graph=True),
    "gradient_as_bucket_view": ddp(gradient_as_bucket_view=True),
    "find_unused_parameters": part_unused_on_one_rank,
    "no_sync": gradients_accumulated,
    "fp16": with_a_hook,
    "post-local-sgd": averaged_now_and_then,
    "zero": zero,
    "fully_shard": parameters_sharded,
    "compiled_ddp": compiled_outside,
    "ddp_of_compiled": compiled_inside,
    "checkpoint": recomputed(use_reentrant=False),
    "reentrant_checkpoint": recomputed(use_reentrant=True),
    "join": joined_unevenly,
}
EAGER: Mapping[str, Way] = dict.fromkeys(("compiled_ddp", "ddp_of_compiled"), WAYS["ddp"])  # compiling takes seconds
ONLY_ON_A_GPU: Mapping[str, Way] = {"sync_batch_norm": normalized_together}
