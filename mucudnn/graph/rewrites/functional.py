"""Exported graphs whose operators write none of their operands.

``ExportedProgram.run_decompositions`` makes one of any graph by running it again on tensors without values, which takes
longer than the export. Here, a graph is rewritten without running it, if its operators in place write new results that
nothing has viewed before, and if the compositions that torch would take apart are among those that are named below.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from mucudnn.graph.nodes import NORM, Node, arguments_of, new_call
from mucudnn.graph.operators.operator import aten

_RESHAPED = {aten.flatten.using_ints, aten.reshape.default}
_DROPOUTS = {aten.dropout.default, aten.dropout_.default}
_MAY_ALIAS = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)  # what schemas do not say


def functional(exported: ExportedProgram) -> ExportedProgram:
    """Return a program of operators that write none of their operands, which may be ``exported`` itself, rewritten."""
    graph = exported.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if _MAY_ALIAS is None or not all(map(_is_known, calls)) or (names := _names_of_written(calls)) is None:
        return cast(ExportedProgram, exported.run_decompositions({}))
    now: dict[Node, Node] = {}  # what later calls read in place of a node
    replaced = []
    for node in [*calls, graph.output_node()]:
        node.args = fx.map_arg(node.args, lambda read: now.get(read, read))
        node.kwargs = fx.map_arg(node.kwargs, lambda read: now.get(read, read))
        with graph.inserting_before(node):
            new = _replacement(graph, node)
        if new is not None:
            now.update(dict.fromkeys(names.get(node, [node]), new))
            replaced.append(node)
    for node in reversed(replaced):
        graph.erase_node(node)
    return exported


def _is_known(node: Node) -> bool:
    """Return whether torch would leave a call as it is, or ``_replacement`` knows another one."""
    target = node.target
    if target is getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target in _DROPOUTS:
        return not arguments_of(node)["train"]
    if target is aten.batch_norm.default:
        arguments = arguments_of(node)
        return not arguments["training"] and arguments["running_mean"] is not None
    if target in {*_RESHAPED, aten.chunk.default, aten.contiguous.default} or _is_in_place(node):
        return True
    name = target._schema.name + ("" if target._overloadname == "default" else f".{target._overloadname}")
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return not (is_composite and _may_view(node))


def _is_in_place(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable and target not in _DROPOUTS


def _may_view(node: Node) -> bool:
    """Return whether the result of a call may share memory with an operand."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    if node.target is aten.batch_norm.default:  # which torch marks for what it writes in training
        return False
    return any(argument.alias_info for argument in node.target._schema.arguments) or _MAY_ALIAS in node.target.tags


def _names_of_written(calls: Sequence[Node]) -> dict[Node, list[Node]] | None:
    """Return the nodes that stand for the same tensor, for each of a tensor that operators in place write.

    None if such an operator writes anything but a new result that nothing views before, or has no equivalent.
    """
    names: dict[Node, list[Node]] = {}  # the first one is the operator that makes the tensor
    place = {node: number for number, node in enumerate(calls)}
    last_write: dict[Node, int] = {}
    for node in calls:
        if node.target in _DROPOUTS:
            names[node] = names.setdefault(node.args[0], [node.args[0]])
            names[node].append(node)
        elif _is_in_place(node):
            if not _computes_the_same(_out_of_place(node), node):
                return None
            names[node] = names.setdefault(node.args[0], [node.args[0]])
            names[node].append(node)
            last_write[names[node][0]] = place[node]
    for first, last in last_write.items():
        if first not in place or _may_view(first):
            return None
        users = {user for node in names[first] for user in node.users if user not in names}
        if any(_may_view(user) and place[user] < last for user in users & place.keys()):
            return None
    return names


def _out_of_place(node: Node) -> Any:
    """Return the operator for what an operator in place computes; None if there is none."""
    schema, overload = node.target._schema, node.target._overloadname
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    name = schema.name.removeprefix("aten::")
    found = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
    if written != [schema.arguments[0].name] or not name.endswith("_") or found is None or found._schema.is_mutable:
        return None
    return found


def _computes_the_same(target: Any, node: Node) -> bool:
    """Return whether an operator has the arguments of one in place, and a result like what that writes."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda operand: operand.meta["val"])
    try:
        result = None if target is None else target(*args, **kwargs)
    except (TypeError, RuntimeError):
        return False
    layouts = {(value.dtype, value.shape, value.stride()) for value in (args[0], result) if isinstance(value, Tensor)}
    return result is not None and len(layouts) == 1


def _replacement(graph: fx.Graph, node: Node) -> Node | None:
    """Return what computes the result of a call without writing an operand; None if the call itself does."""
    value, target = node.meta.get("val"), node.target
    if target in _DROPOUTS:
        return node.args[0]
    if _is_in_place(node):
        return new_call(graph, _out_of_place(node), node.args, value, node.kwargs)
    if target is aten.batch_norm.default:
        arguments = arguments_of(node)
        names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
        empty = value.new_empty(0)
        norm = new_call(graph, NORM, tuple(map(arguments.get, names)), (value, empty, empty))
        return new_call(graph, getitem, (norm, 0), value)
    if target is aten.chunk.default:
        x, count, dim = (arguments_of(node).get(name, 0) for name in ("self", "chunks", "dim"))
        return new_call(graph, aten.split.Tensor, (x, -(-x.meta["val"].shape[dim] // count), dim), value)
    if target in _RESHAPED:
        x, shape = node.args[0], list(value.shape)
        try:
            x.meta["val"].view(shape)
        except (RuntimeError, ValueError):  # its elements are in another order
            dense = {"memory_format": torch.contiguous_format}
            copied = new_call(graph, aten.clone.default, (x,), x.meta["val"].clone(**dense), dense)
            return new_call(graph, aten._unsafe_view.default, (copied, shape), value)
        return new_call(graph, aten.view.default, (x, shape), value)
    return None
