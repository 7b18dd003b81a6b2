"""An averager of models for learners: ranks that step on their own and are corrected towards their average."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import real, shown, whole
from mucudnn.distributed.ranks import group_of_this_process

if TYPE_CHECKING or dist.is_available():
    from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
else:
    ModelAverager = object


class SynchronousModelAveraging(ModelAverager):
    """An averager of models that corrects learners (ranks that train on their own) towards their central average.

    It takes the place of ``PeriodicModelAverager``, such as in ``PostLocalSGDOptimizer(optimizer, averager)``. At each
    ``period``-th step a learner with parameters w is corrected beside the step of its optimizer, and the average z
    moves by the corrections of all learners and by its own momentum:

        c = alpha (w - z);  w <- w - step - c;  z <- z + sum of all c + momentum (z - z before)

    The average starts as the mean of the learners at the first of these steps, after ``warmup_steps`` steps, which
    corrects nothing. A correction is one all-reduce of all parameters that require a gradient, which must be the same
    at each call. Buffers, such as the statistics of batch norm, remain those of each learner.

    period: number of steps between two corrections, 1 for one at each step.
    warmup_steps: number of steps before all corrections.
    alpha: share of the distance to the average that is corrected; None for 1 / number of learners.
    momentum: of the average, from 0 and below 1.
    process_group: the learners; None for the default group.

    step: number of calls so far.
    average: z, a tensor for each parameter; equal on all learners, and empty before the first correction.

    Raises ``InvalidInputError`` for values out of range, and without a process group. With k learners and momentum mu,
    alpha may be at most 2 (1 + mu) / (1 + k + mu): above that, the distance to the average grows without any gradient.

    Source: Koliousis et al., CROSSBOW: Scaling Deep Learning with Small Batch Sizes on Multi-GPU Servers (PVLDB 2019),
    algorithm 1.
    """

    def __init__(
        self,
        period: int = 1,
        warmup_steps: int = 0,
        *,
        alpha: float | None = None,
        momentum: float = 0.9,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(group_of_this_process(process_group))
        self.period, self.warmup_steps = whole(period, "period", 1), whole(warmup_steps, "warmup_steps")
        learners = dist.get_world_size(self.process_group)
        self.alpha = 1 / learners if alpha is None else real(alpha, "alpha")
        self.momentum = real(momentum, "momentum")
        if not 0 <= self.momentum < 1:
            raise InvalidInputError(f"momentum is {shown(momentum)}; it must be at least 0 and below 1")
        largest = 2 * (1 + self.momentum) / (1 + learners + self.momentum)
        if not 0 < self.alpha <= largest:
            raise InvalidInputError(
                f"alpha is {shown(alpha)}; with {learners} learners and momentum {self.momentum:g} it must be above 0 "
                f"and at most {largest:.3g}; None is 1 / {learners}"
            )
        self.average: tuple[Tensor, ...] = ()
        self._average = self._movement = torch.empty(0)  # all parameters in one tensor: z, and z - z before
        self._learner: Tensor | None = None  # w before the step that will be corrected

    def average_parameters(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Correct this learner's parameters in place if it is time to, and the average; all learners must call this.

        params: parameters, or parameter groups of an optimizer, after the optimizer's step.

        Raises ``InvalidInputError`` for another number of parameters than at the first correction.
        """
        parameters = _trainable(params)
        with torch.no_grad():
            if self._is_due() and self._learner is None:
                self._start(parameters)
            elif self._is_due():
                self._correct(parameters)
            self.step += 1
            if self.average and self._is_due():
                self._learner = _in_one(parameters)

    def restart(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Set this learner's parameters to the average, which loses its momentum, as where the learning rate changes.

        All learners must call this. It does nothing before there is an average. Optimizers keep their state.
        """
        with torch.no_grad():
            if self.average:
                for parameter, average in zip(_trainable(params), self.average, strict=True):
                    parameter.copy_(average)
                self._movement.zero_()
                self._learner = self._average.clone()

    def _is_due(self) -> bool:
        return self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0

    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        self._average = _in_one(parameters)
        dist.all_reduce(self._average, group=self.process_group)
        self._average /= dist.get_world_size(self.process_group)
        self._movement = torch.zeros_like(self._average)
        self.average = _like(parameters, self._average)

    def _correct(self, parameters: Sequence[nn.Parameter]) -> None:
        if (given := sum(parameter.numel() for parameter in parameters)) != len(self._average):
            raise InvalidInputError(
                f"params has {given} elements that require a gradient, and the average has {len(self._average)}: give "
                "the same parameters at each step, or make a new averager"
            )
        assert self._learner is not None
        correction = self.alpha * (self._learner - self._average)
        for parameter, part in zip(parameters, _like(parameters, correction), strict=True):
            parameter.sub_(part)
        dist.all_reduce(correction, group=self.process_group)
        self._movement.mul_(self.momentum).add_(correction)
        self._average += self._movement


def _trainable(params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters that require a gradient, of parameters or of parameter groups."""
    groups = ([param] if isinstance(param, Tensor) else param["params"] for param in params)
    return [parameter for parameter in chain.from_iterable(groups) if parameter.requires_grad]


def _in_one(parameters: Sequence[Tensor]) -> Tensor:
    """Return a new tensor of one dimension with the elements of all parameters."""
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _like(parameters: Sequence[Tensor], elements: Tensor) -> tuple[Tensor, ...]:
    """Return views of a tensor of one dimension with the shapes of the parameters: the inverse of ``_in_one``."""
    parts = torch.split(elements, [parameter.numel() for parameter in parameters])
    return tuple(part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True))
