"""Lets ``torch.utils.flop_counter.FlopCounterMode`` count the operators: the same as torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.utils.flop_counter import flop_registry, register_flop_formula

from mucudnn.words.problem import Operation


def count_flops(operation: Operation, operator: OpOverloadPacket[..., Tensor]) -> None:
    """Register torch's own formulas for an operator that computes this operation."""

    def flops(x: Tensor, w: Tensor, third: Tensor | None, *geometry_and_tuning: Any, out_val: Tensor) -> int:
        stride, padding, dilation, groups, _ = geometry_and_tuning
        geometry = stride, padding, dilation, False, (0, 0), groups
        counted: int
        if operation is Operation.FORWARD:
            counted = flop_registry[torch.ops.aten.convolution](x, w, third, *geometry, out_val=out_val)
        else:
            of_data = operation is Operation.BACKWARD_DATA
            arguments = third, x, w, None, *geometry, (of_data, not of_data, False)
            counted = flop_registry[torch.ops.aten.convolution_backward](*arguments, out_val=(out_val, out_val, None))
        return counted

    register_flop_formula(operator, get_raw=True)(flops)
