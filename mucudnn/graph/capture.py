"""Models captured as graphs by torch.export."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mucudnn.core.errors import MucudnnError, first_line, no_images, raise_interruption
from mucudnn.core.problem import MemoryFormat
from mucudnn.graph.guards import Guards, ResultMemory, memories_of_results, replaced_function
from mucudnn.graph.makers import MAKERS, Builder, Maker, local_operator
from mucudnn.graph.nodes import IDENTITIES, Node, described, is_result, shape_of
from mucudnn.graph.operators.convolution import Convolution
from mucudnn.graph.operators.moves import Copy
from mucudnn.graph.operators.operator import VIEWS, Barrier, Captured, Input, Moments, Ref, aten
from mucudnn.graph.rewrites.functional import functional
from mucudnn.graph.rewrites.fused import Fused, fused_convolutions
from mucudnn.graph.rewrites.layers import compute_constants, join_norms, linear_as_convolutions, pixels_as_images
from mucudnn.graph.rewrites.shuffles import join_shuffles
from mucudnn.kernels.memory import dense_strides, format_of, is_free, torch_format
from mucudnn.running.devices import device_of_convolutions
from mucudnn.tuning.model_state import additions, free_of_fakes, undisturbed


class NotCapturedError(MucudnnError):
    """A model cannot be run as a graph, for the reason in the message."""


def capture(model: nn.Module, arguments: tuple[Any, ...], *, puts_rows_first: bool = False) -> Captured:
    """Return the graph of a model in ``eval()`` for arguments of these shapes.

    puts_rows_first: whether bands of volumes have some rows of all frames, instead of some frames.

    Raises ``InvalidInputError`` if there are 0 images, and ``NotCapturedError`` if torch.export cannot trace the model,
    if a call changes it, if it has hooks, or if the values of its tensors cannot be watched.
    """
    _require_no_hooks(model)
    exported, memories, why = _traced(model, arguments)
    # The first call may keep what later ones only read
    kept: list[tuple[Any, str, Any]] | None = []
    if why and is_free(_activation_bytes(exported), device_of_convolutions(model)):
        with undisturbed(model) as before, torch.no_grad():
            model(*arguments)
            kept = additions(before)
            if kept is not None:
                exported, memories, why = _traced(model, arguments)
    # All else that a call changes is no part of a graph
    signature = exported.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
        raise NotCapturedError(f"a call changes {', '.join(map(str, changed))}")
    if why:
        raise NotCapturedError(why)
    kept_leaves = tree_leaves([value for _, _, value in kept or ()])
    bases = {id(memory.base) for memory in memories.values() if isinstance(memory.base, Tensor)}
    if not bases.isdisjoint(map(id, kept_leaves)):
        raise NotCapturedError("a result is what a call keeps in the model")
    with torch.no_grad():
        captured = _graph_of(exported, memories, puts_rows_first=puts_rows_first)
    if puts_rows_first:
        captured = captured.in_order(_by_depth(captured))
    strides = tuple(leaf.stride() for leaf in flattened(arguments) if isinstance(leaf, Tensor))
    return replace(captured, kept=kept or (), strides=strides)


def _require_no_hooks(model: nn.Module) -> None:
    """Raise ``NotCapturedError`` if a call runs functions of users that are not in the model's."""
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        raise NotCapturedError("there are hooks for all modules, which a graph does not call")
    if (name := replaced_function()) is not None:
        raise NotCapturedError(f"{name} has been replaced, which a graph does not call")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            raise NotCapturedError(f"{name or 'the model'} has hooks, which a graph does not call")


def _traced(
    model: nn.Module, arguments: tuple[Any, ...]
) -> tuple[torch.export.ExportedProgram, dict[int, ResultMemory], str | None]:
    """Return the graph of ATen operators, the memory of the results, and why it may not run as a graph now, if so."""
    try:
        guards = Guards(model)
    except Exception as error:  # as may its attributes
        raise_interruption(error)
        raise NotCapturedError(f"its attributes cannot be watched: {first_line(error)}") from error
    if guards.unguarded:
        raise NotCapturedError(f"{guards.unguarded[0]} is a tensor of a kind whose values cannot be watched")
    try:
        with free_of_fakes(model) as changed, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.export warns of its own code
            with undisturbed(model), torch.no_grad():
                exported = functional(torch.export.export(model, arguments, strict=False))
            with undisturbed(model):  # torch.export has put back some attributes
                memories, why = _memories(model, arguments, guards)
    except Exception as error:  # the model may raise anything
        raise_interruption(error)
        raise NotCapturedError(f"torch.export cannot trace it: {type(error).__name__}: {first_line(error)}") from error
    return exported, memories, why or ("a global keeps what it computes" if changed else None)


def _memories(
    model: nn.Module, arguments: tuple[Any, ...], guards: Guards
) -> tuple[dict[int, ResultMemory], str | None]:
    """Return the memory of the results, and what a call changes in the model, or why the memory is not known."""
    try:
        memories = memories_of_results(model, arguments, guards.tensors)
    except Exception as error:  # such as a first call that reads values, to keep what it computes of them
        raise_interruption(error)
        return {}, f"its results are not known: {type(error).__name__}: {first_line(error)}"
    why = guards.check()
    return memories, None if why is None else f"a call changes the model: {why}"


def _activation_bytes(exported: torch.export.ExportedProgram) -> int:
    results = [node.meta.get("val") for node in exported.graph.nodes if node.op == "call_function"]
    return sum(value.nbytes for value in tree_leaves(results) if isinstance(value, Tensor))


def flattened(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the leaves of the arguments, in the order in which ``Input`` counts them."""
    if all(isinstance(argument, Tensor) for argument in arguments):
        return [*arguments]
    return tree_flatten((arguments, {}))[0]


def _by_depth(captured: Captured) -> list[int]:
    """Return the operators in the order of the most convolutions that depend on them.

    A loop over frames comes out of torch.export unrolled: a layer of all its iterations can then be in one segment.
    """
    depths = [0] * len(captured.operators)
    for index, reader in reversed([*enumerate(captured.operators)]):
        for source in (*reader.sources, *reader.wholes):
            depths[source] = max(depths[source], depths[index] + isinstance(reader, Convolution))
    return sorted(range(len(depths)), key=lambda index: -depths[index])


def _graph_of(
    exported: torch.export.ExportedProgram, memories: dict[int, ResultMemory], *, puts_rows_first: bool
) -> Captured:
    """Return a graph of ATen operators as one of ours, node by node."""
    graph, signature = exported.graph_module.graph, exported.graph_signature
    values = [node.meta.get("val") for node in graph.nodes if node.name in signature.user_inputs]
    image = next((value for value in values if isinstance(value, Tensor) and value.dim() in (4, 5)), torch.empty(1))
    if image.shape[0] == 0:
        raise no_images("")
    outputs = exported.call_spec.out_spec
    template = tree_unflatten(range(outputs.num_leaves), outputs)
    builder = Builder(Captured(image.shape[0], image.device, template, memories=memories))
    state = {**exported.state_dict, **exported.constants}
    constants = {
        spec.arg.name: _detached(state[spec.target]) for spec in signature.input_specs if spec.target is not None
    }
    makers = _rewritten(graph, constants, builder.graph.samples, puts_rows_first=puts_rows_first)
    fused = fused_convolutions(graph, constants, builder.graph.samples)
    inside = {node for convolution in fused.values() for node in convolution.nodes[:-1]}
    # Each node adds its operators; results are added while their rows are there
    (leaves,) = graph.output_node().args
    strides = {leaves[number]: memory.stride for number, memory in memories.items()}
    results: dict[fx.Node, Any] = {}
    inputs = 0
    for node in graph.nodes:
        if node.name in constants:
            builder.values[node] = constants[node.name]
        elif node.op == "placeholder":
            is_tensor = isinstance(node.meta.get("val"), Tensor)
            fields = described(node) if is_tensor else {"name": node.name, "shape": (), "dtype": torch.float32}
            builder.values[node] = builder.add(Input(**fields, number=inputs))
            inputs += 1
        elif node.op == "get_attr":
            builder.values[node] = _detached(getattr(exported.graph_module, str(node.target)))
        elif node.op == "call_function" and node not in inside:
            if node in fused:
                builder.values[node] = builder.add(_convolution(builder, node, fused[node]))
            else:
                builder.values[node] = _value_of(builder, node, makers)
            if is_result(node):
                results[node] = _result(builder, node, strides.get(node))
    builder.graph.results = [
        results[leaf] if leaf in results else _result(builder, leaf, strides.get(leaf)) for leaf in leaves
    ]
    _write_viewed(builder.graph)
    return builder.graph


def _write_viewed(captured: Captured) -> None:
    """Leave out a last operator that views pixels as the caller's (N, C): they are written there at once."""
    last = captured.operators[-1]
    if not (isinstance(last, Barrier) and last.target in VIEWS and last.wholes):
        return
    (viewed,), read = last.wholes, [source for each in captured.operators for source in (*each.sources, *each.wholes)]
    returned = [result.index if isinstance(result, Ref) else None for result in captured.results]
    index = len(captured.operators) - 1
    is_only_use = read.count(viewed) == 1 and viewed not in returned and returned.count(index) == 1
    if is_only_use and viewed in captured.direct_results and last.shape == captured.operators[viewed].shape[:2]:
        number = returned.index(index)
        captured.operators.pop()
        captured.direct_results[viewed] = captured.memories[number].stride
        captured.results[number] = Ref(viewed)


def _rewritten(
    graph: fx.Graph, constants: dict[str, Tensor], samples: int, *, puts_rows_first: bool
) -> Mapping[Any, Maker]:
    """Rewrite a graph of ATen in place, and return the makers of what it calls then.

    constants: by name of the node; more are added.
    """
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)  # of results, which arguments of the captured types determine
    compute_constants(graph, constants)
    makers = MAKERS
    if any(len(shape_of(node)) == 5 for node in graph.nodes if node.name not in constants):
        from mucudnn.graph.video.rewrite import rewrite_volumes  # few graphs have volumes

        makers = {**MAKERS, **rewrite_volumes(graph, constants, samples, puts_rows_first=puts_rows_first)}
    else:
        join_shuffles(graph)
        pixels_as_images(graph, constants)
    join_norms(graph)
    linear_as_convolutions(graph, constants)
    graph.eliminate_dead_code()
    return makers


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _convolution(builder: Builder, node: Node, fused: Fused) -> Convolution:
    """Return a convolution with what is computed with it, when the tensors that it reads are there."""
    sources = builder.images([fused.x] if fused.added is None else [fused.x, fused.added])
    assert sources is not None
    return Convolution(
        **described(node),
        sources=sources,
        problem=fused.problem,
        weight=fused.weight.contiguous(memory_format=torch_format(fused.problem)),
        bias=fused.bias,
        activation=fused.activation,
        output_padding=fused.output_padding,
    )


def _value_of(builder: Builder, node: Node, makers: Mapping[Any, Maker]) -> Any:
    """Add the operators of a node, and return what its value is."""
    first = builder.values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    is_same = node.target is aten.type_as.default and node.args[0].meta["val"].dtype == node.meta["val"].dtype
    if (is_same or node.target in IDENTITIES) and isinstance(first, Ref):
        return first
    if node.target is operator.getitem and isinstance(first, tuple):
        return first[node.args[1]]
    value = node.meta.get("val")
    if builder.is_image(value) or isinstance(value, (tuple, list)):
        for make in (makers.get(node.target), local_operator):
            operators = None if make is None else make(builder, node)
            if operators is not None:
                return operators
    return builder.add(_barrier(builder, node))


def _barrier(builder: Builder, node: Node) -> Barrier:
    target, value = node.target, node.meta.get("val")
    if isinstance(target, str) or not callable(target):
        raise NotCapturedError(f"its graph has a node of an unknown kind: {node}")
    values = {operand: builder.values[operand] for operand in node.all_input_nodes}
    wholes = tuple(dict.fromkeys(leaf.index for leaf in tree_leaves([*values.values()]) if isinstance(leaf, Ref)))
    args, kwargs = fx.node.map_arg((tuple(node.args), dict(node.kwargs)), values.__getitem__)
    schema = getattr(target, "_schema", None)
    may_alias = target is operator.getitem or target in VIEWS or schema is None
    if schema is not None:
        may_alias = may_alias or any(result.alias_info is not None for result in schema.returns)
    is_tensor = isinstance(value, Tensor)
    return Barrier(
        name=f"{node.name}: {target}",
        shape=tuple(value.shape) if is_tensor else (),
        dtype=value.dtype if is_tensor else torch.float32,
        device=value.device if is_tensor else builder.graph.device,
        wholes=wholes,
        target=target,
        args=args,
        kwargs=dict(kwargs),
        nbytes=0 if may_alias else sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor)),
        aliases=wholes if may_alias else (),
    )


def _result(builder: Builder, leaf: Any, strides: tuple[int, ...] | None) -> Any:
    """Return a leaf of the output, which bands write with the model's strides if they can.

    strides: None if the leaf is no tensor. ``unshared`` copies results that have other strides.
    """
    value = builder.values[leaf] if isinstance(leaf, fx.Node) else leaf
    if not isinstance(value, Ref) or strides is None or 0 in strides:
        return value
    operators, direct = builder.graph.operators, builder.graph.direct_results
    last = operators[value.index]
    if isinstance(last, Barrier) and last.target in (*VIEWS, aten.permute.default) and last.wholes:
        before, is_view = operators[last.wholes[0]], last.target in VIEWS
        if is_view and before.rows == 1 and before.shape[2:] == (1, 1) and not isinstance(before, Moments):
            # It writes its pixels, (N, C, 1, 1), into the result.
            direct[last.wholes[0]] = dense_strides(before.shape, MemoryFormat.CHANNELS_LAST)
        elif before.rows and not isinstance(before, Moments) and last is operators[-1]:
            if not is_view:
                written = tuple(strides[last.args[1].index(dim)] for dim in range(len(before.shape)))
            elif strides == dense_strides(last.shape, MemoryFormat.CONTIGUOUS):
                written = dense_strides(before.shape, MemoryFormat.CONTIGUOUS)
            else:
                return value
            operators.pop()  # it views a copy, which is written in rows
            fields: dict[str, Any] = {"shape": before.shape, "dtype": before.dtype, "device": before.device}
            copied = builder.add(Copy(name=f"{before.name}, result", sources=last.wholes, **fields))
            direct[copied.index] = written
            builder.values[leaf] = builder.add(last.renumbered({last.wholes[0]: copied.index}))
            return builder.values[leaf]
    if last.rows:
        like = torch.empty_strided(last.shape, strides, device="meta")
        if not like.is_contiguous(memory_format=format_of(MemoryFormat.CHANNELS_LAST, like.dim())):
            value = builder.add(Copy(**described(leaf, name=f"{leaf.name}, result"), sources=(value.index,)))
        direct[value.index] = strides
    return value
