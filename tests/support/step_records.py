"""What training steps leave: tensors, which are compared by their values, and facts, which are equal or not."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass
class Record:
    """A run of a few steps.

    values: tensors in float64, by what and when they are.
    facts: what must be the same: orders of events, shapes, types.
    starts: the state dict before each step.
    raised: the exception that ended the run.
    has_groups: whether groups were turned on.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Tensor]] = field(default_factory=list)
    raised: Exception | None = None
    has_groups: bool = False


def looks(tensor: Any, *, is_inside: bool = False, is_gradient: bool = False) -> Any:
    """Return what of a tensor must be the same, beside its values.

    is_inside: whether it is seen inside the model, where pending tensors are.
    is_gradient: whether it may have another memory format.
    """
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    formats = (
        ()
        if is_gradient
        else tuple(
            tensor.is_contiguous(memory_format=memory_format)
            for memory_format, dims in (
                (torch.contiguous_format, None),
                (torch.channels_last, 4),
                (torch.channels_last_3d, 5),
            )
            if dims in (None, tensor.dim())
        )
    )
    kind = "Tensor" if is_inside else type(tensor).__name__
    return (kind, tuple(tensor.shape), str(tensor.dtype), formats, tensor.requires_grad)


class Log:
    """Where hooks, and the lines of random networks, write what they see in the present step.

    checkpoints: whether blocks are checkpointed.
    sees_backward: whether the backward pass is recorded, too; not for gradients of gradients, whose graph may differ.
    """

    def __init__(self) -> None:
        self.begin(Record(), checkpoints=False)

    def begin(self, record: Record, *, checkpoints: bool) -> None:
        self.record, self.checkpoints, self.step, self.sees_backward = record, checkpoints, 0, True
        self.counts: Counter[str] = Counter()
        self.watched: list[tuple[str, Tensor]] = []

    def begin_step(self, step: int, *, sees_backward: bool = True) -> None:
        self.step, self.sees_backward = step, sees_backward
        self.counts.clear()
        self.watched.clear()

    def value(self, name: str, tensor: Any) -> None:
        """Record a tensor, and how it looks."""
        is_inside, is_gradient = (
            "hook" in name or "kept" in name,
            bool(re.search("gradient|backward|tensor hook", name)),
        )
        name = f"step {self.step}: {name}"
        self.record.facts[f"{name} looks"] = looks(tensor, is_inside=is_inside, is_gradient=is_gradient)
        if isinstance(tensor, Tensor):
            self.record.values[name] = tensor.detach().clone().double()

    def fact(self, name: str, fact: object) -> None:
        self.record.facts[f"step {self.step}: {name}"] = fact

    def event(self, order: str, name: str, tensors: Any = ()) -> None:
        """Record that this has come to pass, as the next of its order, and the tensors that it has seen."""
        if not (self.sees_backward or order == "forward hooks"):
            return
        key = f"{order} {name}"
        count = self.counts[key]
        self.counts[key] += 1
        self.record.facts.setdefault(f"step {self.step}: order of {order}", []).append(name)
        for index, leaf in enumerate(tree_leaves(tensors)):
            self.value(f"{key} #{count} tensor {index}", leaf)

    def numbered(self, name: str) -> str:
        self.counts[name] += 1
        return f"{name} {self.counts[name]}"

    # Called by random networks.

    def hook(self, tensor: Tensor) -> None:
        if tensor.requires_grad:
            name = self.numbered("tensor hook")
            tensor.register_hook(lambda gradient: self.event("tensor hooks", name, gradient))

    def doubling_hook(self, tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient * 2)

    def retain(self, tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.retain_grad()
        self.keep(tensor)

    def keep(self, tensor: Tensor) -> None:
        self.watched.append((self.numbered("kept tensor"), tensor))

    def end_step(self) -> None:
        for name, tensor in self.watched:
            self.value(name, tensor)
            if tensor.retains_grad or tensor.grad_fn is None:
                self.value(f"gradient of {name}", tensor.grad)


LOG = Log()
