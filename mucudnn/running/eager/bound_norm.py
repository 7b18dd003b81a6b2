"""Norms, and how the C++ extension calls the compiled functions for operands of one kind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mucudnn.kernels.compiled import normalization
from mucudnn.kernels.compiled.normalization import Norm
from mucudnn.kernels.pages import on_huge_pages
from mucudnn.running.eager.hot_path import extension

_MOST_DIMS = 5  # that the extension takes


@dataclass(frozen=True, slots=True, eq=False)
class BoundNorm:
    """A norm, with the activation.

    is_fixed: whether the statistics are constants, as those of a frozen norm.
    compiled: calls the compiled functions for operands of one kind; None to call them by ``normalization``.
    mask_bytes: of these operands.
    operands: x, a parameter or None, and a running statistic or None, on the device "meta"; empty without ``compiled``.
    """

    norm: Norm
    is_fixed: bool = False
    compiled: Any = None
    mask_bytes: int = 0
    operands: tuple[Any, ...] = ()
    _variants: dict[tuple[str | None, float], BoundNorm] = field(default_factory=dict)

    def with_operands(self, x: Tensor, parameter: Tensor | None, running: Tensor | None) -> BoundNorm:
        """Return the norm bound to operands like these, if the extension takes them; their values are not used."""
        if extension is None or x.dim() > _MOST_DIMS:
            return self
        entries = normalization.entries(x, self.norm, parameter, running, is_fixed=self.is_fixed)
        alike = [None if one is None else torch.empty_like(one, device="cpu") for one in (x, parameter)]
        statistic = torch.empty((), dtype=torch.float32).expand(entries.statistics)
        is_identity = self.norm.function is None
        compiled = extension.BoundNorm(
            entries.argument, entries.address, *entries.functions, *alike, statistic, is_identity, on_huge_pages
        )
        operands = (None if one is None else torch.empty_like(one, device="meta") for one in (x, parameter, running))
        return BoundNorm(self.norm, self.is_fixed, compiled, entries.mask_bytes, tuple(operands))

    def with_function(self, function: str | None, slope: float) -> BoundNorm:
        """Return the norm with another activation."""
        variant = self._variants.get((function, slope))
        if variant is None:
            variant = BoundNorm(replace(self.norm, function=function, slope=slope), self.is_fixed)
            if self.compiled is not None:
                variant = variant.with_operands(*self.operands)
            self._variants[function, slope] = variant
        return variant
