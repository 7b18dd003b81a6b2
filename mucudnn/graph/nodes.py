"""Nodes of graphs of ATen: what they call, of which arguments, and new ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from mucudnn.core.problem import Sizes
from mucudnn.graph.operators.operator import aten

Node: TypeAlias = Any  # a torch.fx.Node, or what else is an argument of one

NORM = aten._native_batch_norm_legit_no_training.default
ALONG_CHANNELS = {
    *(aten.softmax.int, aten.log_softmax.int, aten._softmax.default),
    *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.linalg_vector_norm.default),
}
CONCATENATIONS = {aten.cat.default, aten.concatenate.default}
IDENTITIES = {
    *(aten.alias.default, aten.detach.default, aten.clone.default, aten.contiguous.default, aten.dropout.default),
}
PADS = {aten.pad.default, aten.constant_pad_nd.default}


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by name, without those left at their defaults."""
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor; () for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def described(node: Node, value: Tensor | None = None, **changes: Any) -> dict[str, Any]:
    """Return the fields that all operators have, for the result of a node.

    value: what is computed; None for what the node returns.
    changes: other values of fields, and further fields.
    """
    value = node.meta["val"] if value is None else value
    return {"name": node.name, "shape": tuple(value.shape), "dtype": value.dtype, "device": value.device} | changes


def sizes(value: Any, count: int) -> Sizes:
    """Return one number for each spatial dimension, from one for all of them or as many."""
    values = [value] if isinstance(value, int) else list(value) or [0]
    return tuple(values) if len(values) == count else (values[0],) * count


def is_pointwise(target: Any) -> bool:
    """Return whether each element of a result of ATen depends on one of each operand, and on no random number."""
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def is_result(node: Node) -> bool:
    """Return whether the graph returns what a node computes."""
    return any(user.op == "output" for user in node.users)


def new_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], value: Any, kwargs: Mapping[str, Any] | None = None
) -> fx.Node:
    """Add a call where the graph inserts nodes.

    value: what it returns, as tensors without values.
    """
    call = graph.call_function(target, args, dict(kwargs or {}))
    call.meta["val"] = value
    return call


def new_view(graph: fx.Graph, node: Node, shape: tuple[int, ...]) -> fx.Node:
    """Add a view of a node in another shape."""
    return new_call(graph, aten.view.default, (node, list(shape)), node.meta["val"].reshape(shape))
