"""Group norm and instance norm by the mean and variance of a whole image of which a model sees one part at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.core.errors import InvalidInputError


@dataclass
class _Pass:
    """A forward pass of ``UpToNorm``.

    called: the numbers of the norms that it has called.
    reached: the input (N, C, H, W) and the number of the first norm whose statistics are not known; None so far.
    """

    called: set[int] = field(default_factory=set)
    reached: tuple[Tensor, int] | None = None


_current: ContextVar[_Pass] = ContextVar("the forward pass of UpToNorm that is running")


class FixedNorm(nn.Module):
    """A group norm, or an instance norm, with given statistics, once ``settle`` has computed them.

    norm: in whose place it is.
    name: of the norm in the model, for errors.
    number: of the norm in the order of the model's modules.

    mean: of each channel, (C,); None as long as it is not known.
    variance: likewise.
    """

    mean: Tensor | None
    variance: Tensor | None

    def __init__(self, norm: Any, name: str, number: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.name, self.number = norm.weight, norm.bias, norm.eps, name, number
        self.groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else norm.num_features
        self.register_buffer("mean", None)
        self.register_buffer("variance", None)

    def settle(self, parts: Iterable[Tensor]) -> None:
        """Compute the statistics, in float64, from the parts that make up one image, (1, C, rows, columns) each."""
        count, sums, squares = 0, torch.zeros(self.groups, dtype=torch.float64), torch.zeros(self.groups).double()
        for part in parts:
            groups = torch.unflatten(part, 1, (self.groups, -1))[0]
            count += groups[0].numel()
            sums += groups.sum((1, 2, 3), dtype=torch.float64)
            squares += torch.linalg.vector_norm(groups, 2, (1, 2, 3), dtype=torch.float64).square()
        mean = sums / count
        variance = (squares / count - mean.square()).clamp_min(0)
        repeats, dtype = part.shape[1] // self.groups, part.dtype
        self.mean, self.variance = (value.repeat_interleave(repeats).to(dtype) for value in (mean, variance))

    def forward(self, x: Tensor) -> Tensor:
        current = _current.get()
        if self.number in current.called:
            raise InvalidInputError(f"{self.name} is called twice; give each call a norm of its own")
        current.called.add(self.number)
        if self.mean is None:  # what follows is not used
            current.reached = current.reached or (x, self.number)
            return x
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, False, 0.0, self.eps)


class UpToNorm(nn.Module):
    """A model whose result, while the statistics of a norm are not known, is the input of the first such norm.

    The second result is then the number of that norm.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def norms(self) -> dict[int, FixedNorm]:
        return {norm.number: norm for norm in self.modules() if isinstance(norm, FixedNorm)}

    def forward(self, x: Tensor) -> Any:
        current = _Pass()
        token = _current.set(current)
        try:
            y = self.model(x)
        finally:
            _current.reset(token)
        return y if current.reached is None else current.reached


def with_fixed_norms(model: nn.Module) -> UpToNorm:
    """Return a copy of a model in ``eval()``, sharing its tensors, with a ``FixedNorm`` in place of each such norm."""
    memo = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    fixed = UpToNorm(copy.deepcopy(model, memo))
    for number, (name, norm) in enumerate([*fixed.named_modules()]):
        uses_input = isinstance(norm, nn.InstanceNorm2d) and norm.running_mean is None
        if isinstance(norm, nn.GroupNorm) or uses_input:
            fixed.set_submodule(name, FixedNorm(norm, name.removeprefix("model."), number))
    return fixed.eval()
