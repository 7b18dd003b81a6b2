"""Models captured as graphs by torch.export."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from mucudnn.core.errors import MucudnnError, first_line, no_images
from mucudnn.graph.builder import Builder, Captured, Node
from mucudnn.graph.fusions import ACTIVATIONS, CONVOLUTIONS, NORM, Fused, convolution_of, fused_at
from mucudnn.graph.guards import Guards
from mucudnn.graph.linear import linear_as_convolutions
from mucudnn.graph.makers import MAKERS, SPLITS, batch_norm, local_operator, may_alias, split
from mucudnn.graph.operators import VIEWS, Barrier, Copy, Input, Moments, Normalization, Operator, Ref, Scale, aten
from mucudnn.graph.sharing import result_views

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
            views = result_views(model, arguments, guards.tensors)
    except Exception as error:  # the model may raise anything
        raise NotCapturedError(f"torch.export cannot trace it: {type(error).__name__}: {first_line(error)}") from error
    signature = exported.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
        raise NotCapturedError(f"a call changes {', '.join(map(str, changed))}")
    if why := guards.why_not():
        raise NotCapturedError(f"a call changes the model: {why}")
    walk = _Walk(exported)
    if walk.made.samples == 0:
        raise no_images("")
    with torch.no_grad():
        made = walk.build()
    made.views = views
    viewed = {view.of for view in views.values() if isinstance(view.of, int)}
    made.strides = {number: leaf.stride() for number, leaf in enumerate(flattened(arguments)) if number in viewed}
    return made


class _Walk(Builder):
    """Makes the operators of a graph of ATen operators, one after another."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        self.exported, self.graph = exported, exported.graph_module.graph
        inputs = exported.graph_signature.user_inputs
        values = [node.meta.get("val") for node in self.graph.nodes if node.name in inputs]
        image = next((value for value in values if isinstance(value, Tensor) and value.dim() == 4), torch.empty(1))
        super().__init__(image.shape[0], image.device)
        self.parts: dict[fx.Node, Fused] = {}  # last node of a fused convolution -> its parts
        self.inside: set[fx.Node] = set()  # other nodes of fused convolutions
        self.results: dict[fx.Node, Any] = {}

    def build(self) -> Captured:
        state = {**self.exported.state_dict, **self.exported.constants}
        lifted = {
            spec.arg.name: _detached(state[spec.target])
            for spec in self.exported.graph_signature.input_specs
            if spec.target is not None
        }
        outputs = self.exported.call_spec.out_spec
        self.made.template = tree_unflatten(range(outputs.num_leaves), outputs)
        self._compute_constants(lifted)
        linear_as_convolutions(self.graph, lifted)
        self._find_fusions(lifted)
        number = 0
        for node in self.graph.nodes:
            if node.op == "placeholder":
                if node.name in lifted:
                    self.values[node] = lifted[node.name]
                    continue
                self._add_input(node, number)
                number += 1
            elif node.op == "get_attr":
                self.values[node] = _detached(getattr(self.exported.graph_module, str(node.target)))
            elif node.name in lifted:
                self.values[node] = lifted[node.name]
            elif node.op == "call_function" and node not in self.inside:
                self.values[node] = self._called(node)
                if any(user.op == "output" for user in node.users):
                    self.results[node] = self._result(node)  # while its rows are there
            elif node.op == "output":
                (leaves,) = node.args
                self.made.results = [self.results.get(one) or self._result(one) for one in leaves]
        return self.made

    def _compute_constants(self, constants: dict[str, Tensor]) -> None:
        """Compute what depends on constants only, such as standardized filters, once."""
        for node in self.graph.nodes:
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

    def _add_input(self, node: Node, number: int) -> None:
        value = node.meta.get("val")
        is_tensor = isinstance(value, Tensor)
        described = self.described(node) if is_tensor else {"name": node.name, "shape": (), "dtype": torch.float32}
        self.values[node] = self.add(Input(**described, number=number))

    def _result(self, leaf: Any) -> Any:
        """Return a leaf of the output; images are copied into the memory format of the model's own, if it differs."""
        value = self.values[leaf] if isinstance(leaf, fx.Node) else leaf
        if not isinstance(value, Ref):
            return value
        made = self.made.operators[value.index]
        if isinstance(made, Barrier):
            self._writes_into(made)
        if made.rows == 0:
            return self._contiguous(value, made, leaf)
        memory_format = torch.channels_last
        if not leaf.meta["val"].is_contiguous(memory_format=torch.channels_last):
            memory_format = torch.contiguous_format
            name = f"{leaf.name}, result"
            value = self.add(Copy(**self.described(leaf) | {"name": name}, sources=(value.index,)))
        self.made.direct_results[value.index] = memory_format
        return value

    def _contiguous(self, value: Ref, made: Operator, leaf: Any) -> Ref:
        """Return the result of a barrier that may have read an image in channels_last, as contiguous as the model's."""
        expected = leaf.meta.get("val")
        if isinstance(made, Input) or not self.is_image(expected) or not expected.is_contiguous():
            return value
        return self.add(
            Barrier(
                **self.described(leaf) | {"name": f"{leaf.name}, contiguous"},
                wholes=(value.index,),
                target=aten.contiguous.default,
                args=(value,),
                kwargs={},
                nbytes=_nbytes(expected),
                aliases=(value.index,),
            )
        )

    def _writes_into(self, view: Barrier) -> None:
        """Let the operator before a view of its pixels, (N, C, 1, 1), write into the result."""
        before = self.made.operators[view.wholes[0]] if view.target in VIEWS and view.wholes else view
        if before.rows == 1 and before.shape[2:] == (1, 1) and not isinstance(before, Moments):
            self.made.direct_results[view.wholes[0]] = torch.channels_last

    # Fusion with convolutions

    def _find_fusions(self, constants: Mapping[str, Tensor]) -> None:
        """Find what is computed with each convolution; the later of two that are added takes the addition."""
        taken: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and node.target in CONVOLUTIONS:
                fused = fused_at(node, constants, taken, self.made.samples)
                if fused is not None:
                    taken.update(fused.nodes)
                    self.parts[fused.last] = fused
                    self.inside.update(fused.nodes[:-1])

    # Operators

    def _called(self, node: Node) -> Any:
        if node in self.parts:
            return self.add(convolution_of(self, self.parts[node]))
        if node.target in _IDENTITIES and isinstance(self.values.get(node.args[0]), Ref):
            return self.values[node.args[0]]
        if node.target is NORM and (normed := batch_norm(self, node)) is not None:
            return (self.add(normed), None, None)
        if node.target is operator.getitem and isinstance(self.values.get(node.args[0]), tuple):
            return self.values[node.args[0]][node.args[1]]
        if node.target in ACTIVATIONS and (index := self._takes_activation(node)) is not None:
            return Ref(index)
        value = node.meta.get("val")
        if self.is_image(value):
            for make in (MAKERS.get(node.target), local_operator):
                made = make(self, node) if make is not None else None
                if made is not None:
                    return made if isinstance(made, (Ref, tuple)) else self.add(made)
        if node.target in SPLITS and (parts := split(self, node)) is not None:
            return parts
        return self.add(self._barrier(node))

    def _takes_activation(self, node: Node) -> int | None:
        """Let the normalization before compute an activation, and return its index; None if it cannot."""
        value = self.values.get(node.args[0])
        if not isinstance(value, Ref) or len(node.args[0].users) > 1:
            return None
        one = self.made.operators[value.index]
        if not isinstance(one, (Normalization, Scale)) or one.activation is not None:
            return None
        one.activation = ACTIVATIONS[node.target]
        return value.index

    def _barrier(self, node: Node) -> Barrier:
        if isinstance(node.target, str) or not callable(node.target):
            raise NotCapturedError(f"its graph has a node of an unknown kind: {node}")
        wholes: list[int] = []

        def given(value: Any) -> Any:
            if isinstance(value, fx.Node):
                value = self.values[value]
                if isinstance(value, tuple) and any(isinstance(one, Ref) for one in value):
                    wholes.extend(one.index for one in value if isinstance(one, Ref))
                elif isinstance(value, Ref):
                    wholes.append(value.index)
                return value
            if isinstance(value, (list, tuple)):
                return type(value)(map(given, value))
            return value

        args, kwargs = given(tuple(node.args)), {name: given(value) for name, value in node.kwargs.items()}
        value = node.meta.get("val")
        is_tensor = isinstance(value, Tensor)
        return Barrier(
            name=f"{node.name}: {node.target}",
            shape=tuple(value.shape) if is_tensor else (),
            dtype=value.dtype if is_tensor else torch.float32,
            device=value.device if is_tensor else self.made.device,
            wholes=tuple(dict.fromkeys(wholes)),
            target=node.target,
            args=args,
            kwargs=kwargs,
            nbytes=0 if may_alias(node.target) else _nbytes(value),
            aliases=tuple(dict.fromkeys(wholes)) if may_alias(node.target) else (),
        )


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _nbytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0


def flattened(arguments: tuple[Any, ...]) -> list[Any]:
    """Return the leaves of the arguments, in the order in which ``Input`` counts them."""
    return tree_flatten((arguments, {}))[0]
