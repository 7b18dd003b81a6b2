"""Hooks of modules."""

from __future__ import annotations

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
