"""Models captured as graphs by torch.export."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mucudnn.core.errors import MucudnnError, first_line, no_images, raise_interruption
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, Sizes
from mucudnn.graph.convolution import Convolution
from mucudnn.graph.guards import Guards, ResultMemory, memories_of_results, replaced_function
from mucudnn.graph.makers import (
    IDENTITIES,
    MAKERS,
    NORM,
    PADS,
    Builder,
    Node,
    arguments_of,
    described,
    local_operator,
    sizes,
)
from mucudnn.graph.moves import Copy
from mucudnn.graph.operators import VIEWS, Barrier, Captured, Input, Moments, Ref, aten, function_of
from mucudnn.graph.rewrites.layouts import put_rows_first
from mucudnn.graph.rewrites.rewrite import rewrite
from mucudnn.kernels.algorithm import ACTIVATIONS
from mucudnn.kernels.memory import dense_strides, format_of, is_free, torch_format
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.problems import problem_of_call
from mucudnn.tuning.model_state import additions, free_of_fakes, undisturbed

_TRANSPOSED = {aten.conv_transpose2d.input, aten.conv_transpose3d.input}
_CONVOLUTIONS = {
    *(aten.conv2d.default, aten.conv2d.padding, aten.conv3d.default, aten.conv3d.padding),
    *(aten.convolution.default, *_TRANSPOSED),
}


class NotCapturedError(MucudnnError):
    """A model cannot be run as a graph, for the reason in the message."""


def capture(model: nn.Module, arguments: tuple[Any, ...], *, puts_rows_first: bool = False) -> Captured:
    """Return the graph of a model in ``eval()`` for arguments of these shapes.

    puts_rows_first: whether bands of volumes have some rows of all frames, instead of some frames.

    Raises ``InvalidInputError`` if there are 0 images, and ``NotCapturedError`` if torch.export cannot trace the model,
    if a call changes it, if it has hooks, or if the values of its tensors cannot be watched.
    """
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        raise NotCapturedError("there are hooks for all modules, which a graph does not call")
    if (name := replaced_function()) is not None:
        raise NotCapturedError(f"{name} has been replaced, which a graph does not call")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            raise NotCapturedError(f"{name or 'the model'} has hooks, which a graph does not call")
    exported, memories, why = _traced(model, arguments)
    kept: list[tuple[Any, str, Any]] | None = []
    if why and is_free(_activation_bytes(exported), device_of_convolutions(model)):
        with undisturbed(model) as before, torch.no_grad():
            model(*arguments)  # the first call may keep what later ones only read
            kept = additions(before)
            exported, memories, why = _traced(model, arguments) if kept is not None else (exported, memories, why)
    signature = exported.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
        raise NotCapturedError(f"a call changes {', '.join(map(str, changed))}")
    if why:
        raise NotCapturedError(f"a call changes the model: {why}")
    own = [id(leaf) for leaf in tree_leaves([value for _, _, value in kept or ()])]
    if any(id(memory.of) in own for memory in memories.values()):
        raise NotCapturedError("a result is what a call keeps in the model")
    with torch.no_grad():
        made = _graph_of(exported, memories, puts_rows_first=puts_rows_first)
    if puts_rows_first:
        made = made.in_order(_by_depth(made))
    made.kept = kept or ()
    made.strides = tuple(leaf.stride() for leaf in flattened(arguments) if isinstance(leaf, Tensor))
    return made


def _traced(
    model: nn.Module, arguments: tuple[Any, ...]
) -> tuple[torch.export.ExportedProgram, dict[int, ResultMemory], str | None]:
    """Return the graph of ATen operators, the memory of the results, and what a call changes in the model, if any."""
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
                exported = torch.export.export(model, arguments, strict=False).run_decompositions({})
            with undisturbed(model):  # torch.export has put back some attributes
                memories = memories_of_results(model, arguments, guards.tensors)
                why = guards.why_not()
    except Exception as error:  # the model may raise anything
        raise_interruption(error)
        raise NotCapturedError(f"torch.export cannot trace it: {type(error).__name__}: {first_line(error)}") from error
    return exported, memories, why or ("a global keeps what it computes" if changed else None)


def _activation_bytes(exported: torch.export.ExportedProgram) -> int:
    made = [node.meta.get("val") for node in exported.graph.nodes if node.op == "call_function"]
    return sum(value.nbytes for value in tree_leaves(made) if isinstance(value, Tensor))


def flattened(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the leaves of the arguments, in the order in which ``Input`` counts them."""
    return tree_flatten((arguments, {}))[0]


def _by_depth(made: Captured) -> list[int]:
    """Return the operators in the order of the most convolutions that depend on them.

    A loop over frames comes out of torch.export unrolled: a layer of all its iterations can then be in one segment.
    """
    behind = [0] * len(made.operators)
    for index, one in reversed([*enumerate(made.operators)]):
        for read in (*one.sources, *one.wholes):
            behind[read] = max(behind[read], behind[index] + isinstance(one, Convolution))
    return sorted(range(len(behind)), key=lambda index: -behind[index])


def _graph_of(
    exported: torch.export.ExportedProgram, memories: dict[int, ResultMemory], *, puts_rows_first: bool
) -> Captured:
    """Return a graph of ATen operators as one of ours, node by node."""
    graph, signature = exported.graph_module.graph, exported.graph_signature
    values = [node.meta.get("val") for node in graph.nodes if node.name in signature.user_inputs]
    image = next((value for value in values if isinstance(value, Tensor) and value.dim() in (4, 5)), torch.empty(1))
    if image.shape[0] == 0:
        raise no_images("")
    builder = Builder(Captured(image.shape[0], image.device, memories=memories))
    outputs = exported.call_spec.out_spec
    builder.made.template = tree_unflatten(range(outputs.num_leaves), outputs)
    state = {**exported.state_dict, **exported.constants}
    constants = {
        spec.arg.name: _detached(state[spec.target]) for spec in signature.input_specs if spec.target is not None
    }
    rewrite(graph, constants)
    if puts_rows_first:
        put_rows_first(graph, constants, builder.made.samples)
        graph.eliminate_dead_code()
    fused = _fused_convolutions(graph, constants, builder.made.samples)
    inside = {node for parts in fused.values() for node in parts.nodes[:-1]}
    (leaves,) = graph.output_node().args
    strides = {leaves[number]: memory.stride for number, memory in memories.items()}
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
                results[node] = _result(builder, node, strides.get(node))  # while its rows are there
        elif node.op == "output":
            builder.made.results = [
                results[one] if one in results else _result(builder, one, strides.get(one)) for one in leaves
            ]
    return builder.made


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _value_of(builder: Builder, node: Node, fused: dict[Node, Fused]) -> Any:
    """Add the operators of a node, and return what its value is."""
    if node in fused:  # the tensors that the convolution reads are there
        parts = fused[node]
        read = parts.x, parts.added
        sources = tuple(index for index in map(builder.image, read) if index is not None)
        assert len(sources) == (1 if parts.added is None else 2)
        is_transposed = parts.problem.operation is Operation.BACKWARD_DATA
        return builder.add(
            Convolution(
                **described(node),
                sources=sources,
                problem=parts.problem,
                weight=parts.weight.contiguous(memory_format=torch_format(parts.problem)),
                bias=parts.bias,
                activation=parts.activation,
                output_padding=parts.output_padding,
                align=parts.problem.stride[0] if is_transposed else 1,  # with which a transposed filter is prepared
            )
        )
    first = builder.values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    is_same = node.target is aten.type_as.default and node.args[0].meta["val"].dtype == node.meta["val"].dtype
    if (is_same or node.target in IDENTITIES) and isinstance(first, Ref):
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


def _result(builder: Builder, leaf: Any, strides: tuple[int, ...] | None) -> Any:
    """Return a leaf of the output, which bands write with the model's strides if they can.

    strides: None if the leaf is no tensor. ``unshared`` copies results that have other strides.
    """
    value = builder.values[leaf] if isinstance(leaf, fx.Node) else leaf
    if not isinstance(value, Ref) or strides is None or 0 in strides:
        return value
    operators, direct = builder.made.operators, builder.made.direct_results
    made = operators[value.index]
    if isinstance(made, Barrier) and made.target in (*VIEWS, aten.permute.default) and made.wholes:
        before, is_view = operators[made.wholes[0]], made.target in VIEWS
        if is_view and before.rows == 1 and before.shape[2:] == (1, 1) and not isinstance(before, Moments):
            # It writes its pixels, (N, C, 1, 1), into the result.
            direct[made.wholes[0]] = dense_strides(before.shape, MemoryFormat.CHANNELS_LAST)
        elif before.rows and not isinstance(before, Moments) and made is operators[-1]:
            if not is_view:
                written = tuple(strides[made.args[1].index(dim)] for dim in range(len(before.shape)))
            elif strides == dense_strides(made.shape, MemoryFormat.CONTIGUOUS):
                written = dense_strides(before.shape, MemoryFormat.CONTIGUOUS)
            else:
                return value
            operators.pop()  # it views a copy, which is written in rows
            of_copy: dict[str, Any] = {"shape": before.shape, "dtype": before.dtype, "device": before.device}
            copied = builder.add(Copy(name=f"{before.name}, result", sources=made.wholes, **of_copy))
            direct[copied.index] = written
            builder.values[leaf] = builder.add(made.renumbered({made.wholes[0]: copied.index}))
            return builder.values[leaf]
    if made.rows:
        like = torch.empty_strided(made.shape, strides, device="meta")
        if not like.is_contiguous(memory_format=format_of(MemoryFormat.CHANNELS_LAST, like.dim())):
            value = builder.add(Copy(**described(leaf, name=f"{leaf.name}, result"), sources=(value.index,)))
        direct[value.index] = strides
    return value


# Convolutions with what surrounds them, folded into their filters or as their epilogues


@dataclass
class Fused:
    """A convolution of x with the nodes that are computed with it, in order, of which the last has the result."""

    nodes: list[Node]
    x: Node
    problem: ConvProblem
    weight: Tensor
    bias: Tensor | None
    output_padding: Sizes
    added: Node | None = None
    activation: str | None = None


def _fused_convolutions(graph: fx.Graph, constants: Mapping[str, Tensor], samples: int) -> dict[Node, Fused]:
    """Return what is computed with each convolution of constants, by the node that has the result.

    constants: by name of the node. The later of two convolutions that are added takes the addition.
    """
    found: dict[Node, Fused] = {}
    taken: set[Node] = set()
    for node in reversed(graph.nodes):
        fused = None
        if node.op == "call_function" and node.target in _CONVOLUTIONS:
            fused = _convolution_at(node, constants, samples)
        if fused is not None:
            _extend(fused, constants, taken)
            taken.update(fused.nodes)
            found[fused.nodes[-1]] = fused
    return found


def _convolution_at(node: Node, constants: Mapping[str, Tensor], samples: int) -> Fused | None:
    """Return a convolution by itself; None for one that is a barrier."""
    given = arguments_of(node)
    weight, bias = (constants.get(getattr(given.get(name), "name", "")) for name in ("weight", "bias"))
    x = getattr(given["input"], "meta", {}).get("val")
    if weight is None or (given.get("bias") is not None and bias is None):
        return None
    if not isinstance(x, Tensor) or x.dim() not in (4, 5) or weight.dim() != x.dim():
        return None
    dims = x.dim() - 2
    is_transposed = bool(given.get("transposed")) or node.target in _TRANSPOSED
    padding, dilation = given.get("padding", 0), sizes(given.get("dilation", 1), dims)
    if padding == "same":
        totals = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
        if any(total % 2 for total in totals):
            return None
        padding = [total // 2 for total in totals]
    elif padding == "valid":
        padding = 0
    if x.dtype != weight.dtype or x.shape[0] != samples:
        return None
    output_padding, nodes, read = sizes(given.get("output_padding", 0), dims), [node], given["input"]
    padding = sizes(padding, dims)
    padded = None if is_transposed else _with_padding_before(node, padding)
    if padded is not None:
        nodes, read, padding = [read, node], read.args[0], padded
    problem = problem_of_call(
        *(read.meta["val"], weight, sizes(given.get("stride", 1), dims), padding, dilation, given.get("groups", 1)),
        is_transposed=is_transposed,
        output_padding=output_padding,
        memory_format=MemoryFormat.CHANNELS_LAST,
    )
    if problem is None:
        return None
    bias = None if bias is None else bias.detach()
    return Fused(nodes, read, problem, weight.detach(), bias, output_padding)


def _with_padding_before(node: Node, padding: Sizes) -> Sizes | None:
    """Return the padding of a convolution and of the operator before it, which only it reads; None if that is not one.

    The first number is that above, or before the first frame; on the other side there may be less: causal padding.
    """
    before = node.args[0]
    if before.target not in PADS or _only_reader(before) is not node:
        return None
    given = arguments_of(before)
    pairs = list(zip(given["pad"][::2], given["pad"][1::2], strict=True))
    if given.get("mode", "constant") != "constant" or given.get("value") or len(pairs) > len(padding):
        return None
    pairs += [(0, 0)] * (len(padding) - len(pairs))
    *others, (first, last) = pairs
    if any(low != high for low, high in others) or min(map(min, pairs)) < 0 or last > first:
        return None
    return tuple(own + low for own, (low, _) in zip(padding, reversed(pairs), strict=True))


def _extend(fused: Fused, constants: Mapping[str, Tensor], taken: set[Node]) -> None:
    """Add the nodes that can be computed with a convolution: batch norm, a factor, an addition, an activation."""
    y, is_transposed = fused.nodes[-1], fused.problem.operation is Operation.BACKWARD_DATA
    following = _only_reader(y)
    if following is not None and following.target is NORM and y is following.args[0]:
        normed = _only_reader(following)
        is_foldable = normed is not None and normed.target is operator.getitem and normed.args[1] == 0
        if is_foldable and _fold_norm(fused, following, constants):
            fused.nodes += [following, normed]
            following = _only_reader(normed)
    if following is not None and following.target is aten.mul.Tensor and isinstance(following.args[1], (int, float)):
        fused.weight = fused.weight * following.args[1]
        fused.bias = None if fused.bias is None else fused.bias * following.args[1]
        fused.nodes.append(following)
        following = _only_reader(following)
    if following is not None and following not in taken and not is_transposed:
        other = _other_of_sum(following, fused.nodes[-1])
        if other is not None:
            fused.added = other
            fused.nodes.append(following)
            following = _only_reader(following)
    if following is not None and following not in taken and following.op == "call_function":
        activation = function_of(following.target, following.args)
        if activation in ACTIVATIONS:
            fused.activation = activation
            fused.nodes.append(following)


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other_of_sum(node: Node, y: Node) -> Node | None:
    """Return what is added to y, if the node adds another result of the same shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    other = second if first is y else first
    if not isinstance(other, fx.Node) or other is y or other.op != "call_function":
        return None
    value, own = other.meta.get("val"), y.meta["val"]
    is_alike = isinstance(value, Tensor) and own.shape == value.shape and own.dtype == value.dtype
    return other if is_alike else None


def _fold_norm(fused: Fused, norm: Node, constants: Mapping[str, Tensor]) -> bool:
    """Fold batch norm into the filter and the bias, in float64, rounded once; return whether that was possible."""
    is_transposed = fused.problem.operation is Operation.BACKWARD_DATA
    *nodes, _, eps = norm.args[1:]
    given = [node for node in nodes if node is not None]
    if (is_transposed and fused.problem.groups > 1) or any(node.name not in constants for node in given):
        return False
    scale, shift, mean, variance = (None if node is None else constants[node.name].double() for node in nodes)
    if mean is None or variance is None:
        return False
    bias = None if fused.bias is None else fused.bias.double()
    weight, bias = fuse_conv_bn_weights(fused.weight.double(), bias, mean, variance, eps, scale, shift, is_transposed)
    folded = [one.detach().to(fused.weight.dtype) for one in (weight, bias)]
    if not all(one.isfinite().all() for one in folded):
        return False
    fused.weight, fused.bias = folded
    return True
