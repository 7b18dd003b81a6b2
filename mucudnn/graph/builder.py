"""State shared by the functions that make operators of ATen calls: the graph so far, and the result of each node."""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from mucudnn.graph.operators import CPU, Copy, Operator, Ref
from mucudnn.graph.sharing import View

Node: TypeAlias = Any  # a torch.fx.Node, or what else is an argument of one


def _operator_named(packet: str, overload: str) -> Any:
    namespace, name = packet.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


# Torch's operators, which are part of a graph, cannot be pickled otherwise.
copyreg.pickle(
    torch._ops.OpOverload, lambda one: (_operator_named, (one._schema.name, one._schema.overload_name or "default"))
)


@dataclass
class Captured:
    """A model as a graph, for a batch of ``samples`` on a device.

    results: of each leaf of its output, a ``Ref`` or a constant. template: the output, with numbers of leaves.
    direct_results: the results that operators write as the caller gets them, by index, with their memory format. views:
    the memory of each result,
    by its number; strides: of the arguments of which a result is a view, which must have these.
    """

    samples: int
    device: torch.device = CPU
    template: Any = 0
    operators: list[Operator] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    direct_results: dict[int, torch.memory_format] = field(default_factory=dict)
    views: dict[int, View] = field(default_factory=dict)
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def result_indices(self) -> frozenset[int]:
        return frozenset(one.index for one in self.results if isinstance(one, Ref))

    def in_order(self, order: Sequence[int]) -> Captured:
        """Return the graph that runs its operators in this order, which may have some of them more than once.

        Each reads what ran last of those that it may read.
        """
        numbers: dict[int, int] = {}
        made = Captured(self.samples, self.device, self.template, views=self.views, strides=self.strides)
        for number, index in enumerate(order):
            made.operators.append(self.operators[index].renumbered(numbers))
            numbers[index] = number
        made.results = [Ref(numbers[one.index]) if isinstance(one, Ref) else one for one in self.results]
        made.direct_results = {numbers[index]: given for index, given in self.direct_results.items()}
        return made

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        return tree_map(leaves.__getitem__, self.template)


class Builder:
    """Makes the operators of a graph, one after another. values: what nodes became, a ``Ref``, constant, or tuple."""

    def __init__(self, samples: int, device: torch.device) -> None:
        self.made = Captured(samples, device)
        self.values: dict[fx.Node, Any] = {}
        self.images: dict[fx.Node, Ref] = {}  # copies of inputs and results of barriers, in channels_last

    def add(self, made: Operator) -> Ref:
        self.made.operators.append(made)
        return Ref(len(self.made.operators) - 1)

    def is_image(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dim() == 4
            and value.shape[0] == self.made.samples
            and value.is_floating_point()
            and value.numel() > 0
        )

    def described(self, node: Node) -> dict[str, Any]:
        value = node.meta["val"]
        return {"name": node.name, "shape": tuple(value.shape), "dtype": value.dtype, "device": value.device}

    def image(self, node: Node) -> int | None:
        """Return the index of a result that may be read in rows, in channels_last; None for anything else."""
        if not isinstance(node, fx.Node) or not self.is_image(node.meta.get("val")):
            return None
        value = self.values.get(node)
        if not isinstance(value, Ref):
            return None
        if self.made.operators[value.index].rows == 0:
            if node not in self.images:
                copy = Copy(**(self.described(node) | {"name": f"{node.name}, channels_last"}), sources=(value.index,))
                self.images[node] = self.add(copy)
            value = self.images[node]
        return value.index

    def constant(self, node: Node) -> Any:
        """Return a constant or a plain argument; raises ``KeyError`` for a result."""
        value = self.values[node] if isinstance(node, fx.Node) else node
        if isinstance(value, Ref):
            raise KeyError(node)
        return value
