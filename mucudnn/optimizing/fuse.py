"""Fusion of convolutions with the operations after them, for inference, on graphs of torch.fx.

Fused nodes directly follow their convolution, and each is the only user of the node before it. So no other node reads
an intermediate result, the order of the other nodes is unchanged, and in-place operations elsewhere do no harm.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._pytree import tree_map

from mucudnn.modules.fused import FusedConvolution
from mucudnn.modules.tuned_classes import OURS
from mucudnn.running.hooks import has_hooks
from mucudnn.tracing.own_step import undisturbed
from mucudnn.words.errors import InvalidInputError, first_line
from mucudnn.words.warning import warn

_CONVOLUTIONS = frozenset(chain(OURS, OURS.values()))  # exact classes, since a subclass may compute something else
_BATCH_NORMS = frozenset({nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d})
_ADDITIONS: frozenset[Any] = frozenset({operator.add, operator.iadd, torch.add, "add", "add_"})
_ACTIVATIONS: Mapping[Any, str] = {  # modules, functions and methods -> names in ``ACTIVATIONS``
    **dict.fromkeys((nn.ReLU, F.relu, torch.relu, torch.relu_, "relu", "relu_"), "ReLU"),
    **dict.fromkeys((nn.ReLU6, F.relu6), "ReLU6"),
    **dict.fromkeys((nn.SiLU, F.silu), "SiLU"),
}
_PLAIN = (bool, int, float, str, type(None))


class _NotTraceableError(Exception):
    """torch.fx cannot replace a model by a graph, for the reason in the message."""


def fuse(model: nn.Module, sample_input: Any) -> nn.Module:
    """Return a graph of the model in which convolutions are fused with the operations after them, for inference.

    Batch norm is folded into the filter before it; the addition of another result and a ReLU, ReLU6 or SiLU are
    computed in place on the result of the convolution. The model is not changed. The graph shares all of its tensors
    except the folded ones.

    sample_input: the only argument, or a tuple of all positional ones. Numbers, flags, text and None among the
    arguments, including defaults, are fixed: called with other values, the graph raises ``AssertionError``.

    Returns the model itself if there is nothing to fuse, or, with a warning, if no graph can replace it: torch.fx
    cannot trace it, hooks would not be called, or the graph gives other values on the sample input.

    Raises ``InvalidInputError`` if the model or a part of it is in training mode.
    """
    require_inference(model, "fuse")
    arguments = sample_input if isinstance(sample_input, tuple) else (sample_input,)
    try:
        with undisturbed(model), torch.no_grad():
            traced = _traced(model, arguments)
    except Exception as error:  # the user's forward and copying it may raise anything
        why = str(error) if isinstance(error, _NotTraceableError) else f"{type(error).__name__}: {first_line(error)}"
        warn(f"nothing is fused, the model runs as it is: {why}")
        return model
    _without_identities(traced)
    fused = [_fuse_at(node, traced) for node in list(traced.graph.nodes)]
    if not any(fused):
        return model
    traced.delete_all_unused_submodules()
    traced.graph.lint()
    traced.recompile()
    return traced.eval()


def require_inference(model: nn.Module, setting: str) -> None:
    """Raise ``InvalidInputError`` if a part of the model is in training mode. setting: the name of what needs it."""
    for name, module in model.named_modules():
        if module.training:
            raise InvalidInputError(
                f"{setting} is for inference, and {name or 'the model'} is in training mode: call model.eval() before, "
                f"or leave {setting} out"
            )


# The graph


class _Tracer(fx.Tracer):
    """Tracer that keeps every convolution a module, including convolutions of classes outside torch."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _ConvNd) or super().is_leaf_module(m, module_qualified_name)


def _traced(model: nn.Module, arguments: Sequence[Any]) -> fx.GraphModule:
    """Trace a copy of the model that shares all its tensors, and return the graph.

    Raises ``_NotTraceableError`` if torch.fx cannot trace the model, and any error of the model.
    """
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    root, tracer = copy.deepcopy(model, shared), _Tracer()
    for name, module in root.named_modules():
        if has_hooks(module) and (not name or not tracer.is_leaf_module(module, name)):
            raise _NotTraceableError(f"{name or 'the model'} has hooks, which a graph does not call")
    traced = fx.GraphModule(root, tracer.trace(root, _fixed(root, arguments)), type(model).__name__)
    _require_equal(model, traced, arguments)
    return traced


def _fixed(model: nn.Module, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return the plain arguments by name, which are fixed: the model may branch on them, but the graph cannot."""
    bound = inspect.signature(model.forward).bind(*arguments)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if isinstance(value, _PLAIN)}


def _require_equal(model: nn.Module, traced: nn.Module, arguments: Sequence[Any]) -> None:
    """Raise ``_NotTraceableError`` if the model and its graph give different results."""
    expected, found = (_result(one, arguments) for one in (model, traced))
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        raise _NotTraceableError(
            f"its graph and the model give different results on the sample input: {first_line(error)}"
        ) from error


def _result(model: nn.Module, arguments: Sequence[Any]) -> Any:
    """Return the model's result on copies of the tensors, which it may change; the random state is restored."""
    with torch.random.fork_rng():
        return model(*tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tuple(arguments)))


# Fusion


def _without_identities(traced: fx.GraphModule) -> None:
    """Remove ``nn.Identity`` nodes, so that a convolution is directly followed by the next operation."""
    for node in traced.graph.nodes:
        if type(_called(node, traced)) is nn.Identity and len(node.args) == 1:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def _fuse_at(node: fx.Node, traced: fx.GraphModule) -> bool:
    """Fuse the convolution that a node calls with the operations after it; return whether there were any."""
    convolution = _called(node, traced)
    if not isinstance(convolution, _ConvNd) or type(convolution) not in _CONVOLUTIONS:
        return False
    if not _is_called_once(node, traced):
        return False
    parts, batch_norm, added, activation = [node], None, None, None
    if (norm := _follower(node)) is not None and _folds(convolution, _called(norm, traced)):
        batch_norm = str(norm.target)
        parts.append(norm)
    if (sum_ := _follower(parts[-1])) is not None and (added := _added(sum_, parts[-1])) is not None:
        parts.append(sum_)
    if (last := _follower(parts[-1])) is not None and (activation := _activation(last, parts[-1], traced)) is not None:
        parts.append(last)
    if len(parts) == 1:
        return False
    fused = FusedConvolution(convolution, batch_norm=batch_norm, adds=added is not None, activation=activation)
    traced.set_submodule(str(node.target), fused)
    parts[-1].replace_all_uses_with(node)
    node.args = node.args if added is None else (*node.args, added)
    for part in reversed(parts[1:]):
        traced.graph.erase_node(part)
    return True


def _called(node: fx.Node, traced: fx.GraphModule) -> nn.Module | None:
    """Return the module that a graph node calls; None if it calls no module or one with hooks."""
    if node.op != "call_module":
        return None
    module = traced.get_submodule(str(node.target))
    return None if has_hooks(module) else module


def _is_called_once(node: fx.Node, traced: fx.GraphModule) -> bool:
    """Return whether the node is a plain call of a module of which nothing else in the graph uses any part."""
    of_module = [one for one in traced.graph.nodes if one.op == "call_module" and one.target == node.target]
    inside = f"{node.target}."
    is_read = any(one.op == "get_attr" and str(one.target).startswith(inside) for one in traced.graph.nodes)
    return len(of_module) == 1 and not is_read and len(node.args) == 1 and not node.kwargs


def _follower(node: fx.Node) -> fx.Node | None:
    """Return the next node in the graph if it is the only user of this node's result; None otherwise."""
    return node.next if list(node.users) == [node.next] else None


def _added(node: fx.Node, y: fx.Node) -> fx.Node | None:
    """Return the tensor that a node adds to y; None if it is not a plain addition or writes into another tensor."""
    if node.op not in ("call_function", "call_method") or node.target not in _ADDITIONS:
        return None
    if len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    is_either_way = node.target in (operator.add, torch.add)
    other = first if second is y and is_either_way else second if first is y else None
    return other if isinstance(other, fx.Node) and other is not y else None


def _activation(node: fx.Node, y: fx.Node, traced: fx.GraphModule) -> str | None:
    """Return the name of the activation that a node applies to y, or None if the node applies no known activation."""
    if node.args[:1] != (y,) or set(node.kwargs) - {"inplace"}:
        return None
    computed = type(_called(node, traced)) if node.op == "call_module" else node.target
    return _ACTIVATIONS.get(computed)


def _folds(convolution: _ConvNd, norm: nn.Module | None) -> bool:
    """Fold batch norm into a new filter and bias of the convolution if possible; return whether that was done.

    Filter and bias are computed in float64 and rounded once. Nothing is folded if they overflow the dtype.
    """
    is_transposed = isinstance(convolution, _ConvTransposeNd)
    if type(norm) not in _BATCH_NORMS or (is_transposed and convolution.groups > 1):
        return False
    assert isinstance(norm, _BatchNorm)
    if norm.running_mean is None or norm.running_var is None or not convolution.weight.is_floating_point():
        return False
    mean, variance, w = (one.detach().double() for one in (norm.running_mean, norm.running_var, convolution.weight))
    b, scale, shift = (
        None if one is None else one.detach().double() for one in (convolution.bias, norm.weight, norm.bias)
    )
    folded = fuse_conv_bn_weights(w, b, mean, variance, norm.eps, scale, shift, is_transposed)
    weight, bias = (tensor.detach().to(convolution.weight.dtype) for tensor in folded)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        return False
    convolution.weight, convolution.bias = (nn.Parameter(tensor, requires_grad=False) for tensor in (weight, bias))
    return True
