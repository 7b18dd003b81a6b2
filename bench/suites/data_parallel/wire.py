"""Torch's methods to synchronize ranks: communication hooks of DistributedDataParallel, and parameter averaging."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mucudnn.bench.suites.data_parallel import Communication

_BEFORE_POWERSGD = 2  # Number of steps before PowerSGD, which allows no fewer; torch rebuilds the buckets in the first.


@dataclass(frozen=True, slots=True)
class Wire:
    """The communication between the ranks that train a model, by one of torch's methods.

    period: steps between two averagings of the parameters over all ranks, if ``communication`` averages them.
    """

    communication: Communication
    period: int

    @property
    def first_steps(self) -> int:
        """The number of warm-up steps, in which torch sets up its communication.

        After the last of these steps, all ranks have equal parameters.
        """
        return self.period + 1 if self.communication.averages_parameters else _BEFORE_POWERSGD + 1

    @property
    def steps_to_equality(self) -> int:
        """The number of steps after which ranks that started with equal parameters have equal parameters again."""
        return self.period if self.communication.averages_parameters else 1

    def connect(self, model: DistributedDataParallel, optimizer: Optimizer) -> Optimizer:
        """Set up this communication for the model, and return the optimizer to train the model with."""
        hooks: dict[Communication, tuple[Any, Any]] = {
            Communication.FP16: (None, fp16_compress_hook),
            Communication.BF16: (None, bf16_compress_hook),
        }
        if self.communication is Communication.POWERSGD:
            hooks[self.communication] = PowerSGDState(None, start_powerSGD_iter=_BEFORE_POWERSGD), powerSGD_hook
        if self.communication.averages_parameters:
            # Imported here because torch.distributed.optim issues warnings about its own deprecated code.
            from torch.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

            hooks[self.communication] = _no_gradients_after(self.period), post_localSGD_hook
            optimizer = PostLocalSGDOptimizer(optimizer, self._averager())
        if self.communication in hooks:
            model.register_comm_hook(*hooks[self.communication])
        return optimizer

    def bytes_of_step(self, model: DistributedDataParallel) -> float:
        """Return the bytes that a rank passes to collectives in a step, on average over the averaging period."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        every = sum(p.numel() * p.itemsize for p in parameters)
        match self.communication:
            case Communication.FP16 | Communication.BF16:
                return sum(2 * p.numel() for p in parameters)
            case Communication.POWERSGD:
                return sum(_rank_one_elements(p) * p.itemsize for p in parameters)
            case Communication.POST_LOCAL_SGD:
                return every / self.period
            case Communication.HIERARCHICAL_SGD:
                return every * len(levels(self.period, dist.get_world_size())) / self.period
            case _:
                return every

    def _averager(self) -> ModelAverager:
        if self.communication is Communication.POST_LOCAL_SGD:
            return PeriodicModelAverager(self.period, warmup_steps=self.period)
        by_period = levels(self.period, dist.get_world_size())
        return HierarchicalModelAverager(by_period, warmup_steps=self.period)  # type: ignore[no-untyped-call]


def _rank_one_elements(gradient: Tensor) -> int:
    """Return the number of elements that PowerSGD sends for a gradient: two vectors if that saves at least half."""
    if gradient.ndim < 2:
        return gradient.numel()
    rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
    return rows + columns if 2 * (rows + columns) < gradient.numel() else gradient.numel()


def _no_gradients_after(steps: int) -> PostLocalSGDState:
    """Return the state of a hook that averages gradients over all ranks, in the first ``steps`` steps only."""
    return PostLocalSGDState(None, None, steps, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]


def levels(period: int, ranks: int) -> OrderedDict[int, int]:
    """Return how many ranks average their parameters together, by the number of steps between two averagings.

    All ranks average every ``period`` steps. Halfway between, the ranks of each host average among themselves; on a
    single host, the smallest groups into which the ranks can be divided do. If there are no such groups, or no step is
    halfway, only all ranks average.

    >>> dict(levels(4, 8)), dict(levels(4, 2))
    ({2: 2, 4: 8}, {4: 2})
    """
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    small = next((n for n in (on_host, *range(2, ranks)) if 1 < n < ranks and ranks % n == 0), None)
    within = {} if small is None or period % 2 else {period // 2: small}
    return OrderedDict({**within, period: ranks})
