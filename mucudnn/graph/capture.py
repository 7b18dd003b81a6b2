"""Models captured as graphs by torch.export."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mucudnn.core.errors import MucudnnError, first_line, no_images
from mucudnn.graph.fusions import Fused, Node, fused_convolutions, linear_as_convolutions
from mucudnn.graph.guards import Guards
from mucudnn.graph.makers import MAKERS, Builder, convolution_of, described, local_operator
from mucudnn.graph.operators import VIEWS, Barrier, Captured, Copy, Input, Moments, Ref, aten
from mucudnn.graph.sharing import memories_of_results

_IDENTITIES = {
    aten.dropout.default,
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.contiguous.default,
}


class NotCapturedError(MucudnnError):
    """A model cannot be run as a graph, for the reason in the message."""


def capture(model: nn.Module, arguments: tuple[Any, ...]) -> Captured:
    """Return the graph of a model in ``eval()`` for arguments of these shapes.

    Raises ``InvalidInputError`` if there are 0 images, and ``NotCapturedError`` if torch.export cannot trace the model,
    if a call changes it, if it has hooks, or if the values of its tensors cannot be watched.
    """
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        raise NotCapturedError("there are hooks for all modules, which a graph does not call")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            raise NotCapturedError(f"{name or 'the model'} has hooks, which a graph does not call")
    guards = Guards(model)
    if guards.unguarded:
        raise NotCapturedError(f"{guards.unguarded[0]} is a tensor of a kind whose values cannot be watched")
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export warns of its own code
            exported = torch.export.export(model, arguments, strict=False).run_decompositions({})
            memories = memories_of_results(model, arguments, guards.tensors)
    except Exception as error:  # the model may raise anything
        raise NotCapturedError(f"torch.export cannot trace it: {type(error).__name__}: {first_line(error)}") from error
    signature = exported.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
        raise NotCapturedError(f"a call changes {', '.join(map(str, changed))}")
    if why := guards.why_not():
        raise NotCapturedError(f"a call changes the model: {why}")
    with torch.no_grad():
        made = _graph_of(exported)
    made.memories = memories
    viewed = {memory.of for memory in memories.values() if isinstance(memory.of, int)}
    made.strides = {number: leaf.stride() for number, leaf in enumerate(flattened(arguments)) if number in viewed}
    return made


def flattened(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the leaves of the arguments, in the order in which ``Input`` counts them."""
    return tree_flatten((arguments, {}))[0]


def _graph_of(exported: torch.export.ExportedProgram) -> Captured:
    """Return a graph of ATen operators as one of ours, node by node."""
    graph, signature = exported.graph_module.graph, exported.graph_signature
    values = [node.meta.get("val") for node in graph.nodes if node.name in signature.user_inputs]
    image = next((value for value in values if isinstance(value, Tensor) and value.dim() == 4), torch.empty(1))
    if image.shape[0] == 0:
        raise no_images("")
    builder = Builder(Captured(image.shape[0], image.device))
    outputs = exported.call_spec.out_spec
    builder.made.template = tree_unflatten(range(outputs.num_leaves), outputs)
    state = {**exported.state_dict, **exported.constants}
    constants = {
        spec.arg.name: _detached(state[spec.target]) for spec in signature.input_specs if spec.target is not None
    }
    _compute_constants(graph, constants)
    linear_as_convolutions(graph, constants)
    fused = fused_convolutions(graph, constants, builder.made.samples)
    inside = {node for parts in fused.values() for node in parts.nodes[:-1]}
    results: dict[fx.Node, Any] = {}
    inputs = 0
    for node in graph.nodes:
        if node.name in constants:
            builder.values[node] = constants[node.name]
        elif node.op == "placeholder":
            is_tensor = isinstance(node.meta.get("val"), Tensor)
            of_input = described(node) if is_tensor else {"name": node.name, "shape": (), "dtype": torch.float32}
            builder.values[node] = builder.add(Input(**of_input, number=inputs))
            inputs += 1
        elif node.op == "get_attr":
            builder.values[node] = _detached(getattr(exported.graph_module, str(node.target)))
        elif node.op == "call_function" and node not in inside:
            builder.values[node] = _value_of(builder, node, fused)
            if any(user.op == "output" for user in node.users):
                results[node] = _result(builder, node)  # while its rows are there
        elif node.op == "output":
            (leaves,) = node.args
            builder.made.results = [results[one] if one in results else _result(builder, one) for one in leaves]
    return builder.made


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _compute_constants(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Compute what depends on constants only, such as standardized filters, once."""
    for node in graph.nodes:
        is_called = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
        if not is_called or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        is_result = any(user.op == "output" for user in node.users)
        if is_result or not all(one.name in constants for one in node.all_input_nodes):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: constants[one.name])
        value = node.target(*args, **kwargs)
        if isinstance(value, Tensor):
            constants[node.name] = value


def _value_of(builder: Builder, node: Node, fused: dict[Node, Fused]) -> Any:
    """Add the operators of a node, and return what its value is."""
    if node in fused:
        return convolution_of(builder, fused[node])
    first = builder.values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if node.target in _IDENTITIES and isinstance(first, Ref):
        return first
    if node.target is operator.getitem and isinstance(first, tuple):
        return first[node.args[1]]
    value = node.meta.get("val")
    if builder.is_image(value) or isinstance(value, (tuple, list)):
        for make in (MAKERS.get(node.target), local_operator):
            made = None if make is None else make(builder, node)
            if made is not None:
                return made
    return builder.add(_barrier(builder, node))


def _barrier(builder: Builder, node: Node) -> Barrier:
    target, value = node.target, node.meta.get("val")
    if isinstance(target, str) or not callable(target):
        raise NotCapturedError(f"its graph has a node of an unknown kind: {node}")
    values = {one: builder.values[one] for one in node.all_input_nodes}
    wholes = tuple(dict.fromkeys(one.index for one in tree_leaves([*values.values()]) if isinstance(one, Ref)))
    args, kwargs = fx.node.map_arg((tuple(node.args), dict(node.kwargs)), values.__getitem__)
    schema = getattr(target, "_schema", None)
    may_alias = target is operator.getitem or target in VIEWS or schema is None
    if schema is not None:
        may_alias = may_alias or any(one.alias_info is not None for one in schema.returns)
    is_tensor = isinstance(value, Tensor)
    return Barrier(
        name=f"{node.name}: {target}",
        shape=tuple(value.shape) if is_tensor else (),
        dtype=value.dtype if is_tensor else torch.float32,
        device=value.device if is_tensor else builder.made.device,
        wholes=wholes,
        target=target,
        args=args,
        kwargs=dict(kwargs),
        nbytes=0 if may_alias else sum(one.nbytes for one in tree_leaves(value) if isinstance(one, Tensor)),
        aliases=wholes if may_alias else (),
    )


def _result(builder: Builder, leaf: Any) -> Any:
    """Return a leaf of the output; images are copied into the memory format of the model's own, if it differs."""
    value = builder.values[leaf] if isinstance(leaf, fx.Node) else leaf
    if not isinstance(value, Ref):
        return value
    operators, direct = builder.made.operators, builder.made.direct_results
    made, expected = operators[value.index], leaf.meta["val"]
    if isinstance(made, Barrier) and made.target in VIEWS and made.wholes:
        before = operators[made.wholes[0]]
        if before.rows == 1 and before.shape[2:] == (1, 1) and not isinstance(before, Moments):
            direct[made.wholes[0]] = torch.channels_last  # it writes its pixels, (N, C, 1, 1), into the result
    if made.rows == 0:
        # A barrier may have read an image in channels_last.
        if isinstance(made, Input) or not builder.is_image(expected) or not expected.is_contiguous():
            return value
        return builder.add(
            Barrier(
                **described(leaf, name=f"{leaf.name}, contiguous"),
                wholes=(value.index,),
                target=aten.contiguous.default,
                args=(value,),
                kwargs={},
                nbytes=expected.nbytes,
                aliases=(value.index,),
            )
        )
    memory_format = torch.channels_last
    if not expected.is_contiguous(memory_format=torch.channels_last):
        memory_format = torch.contiguous_format
        value = builder.add(Copy(**described(leaf, name=f"{leaf.name}, result"), sources=(value.index,)))
    direct[value.index] = memory_format
    return value
