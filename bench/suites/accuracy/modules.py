"""Accuracy and time of any module of a model, by the same metrics as for convolution operators.

The module is called with the arguments that the model passes to it. The reference is a copy of the module in float64.
Both are in eval mode, because dropout would use different random masks.

Result rows use the names of a convolution's operations: forward is the output, backward data the gradient of the
input, and backward filter the gradients of all parameters together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import write_missing
from mucudnn.bench.suites.accuracy.layers import MetricsOptions, Untimed, timed
from mucudnn.bench.suites.accuracy.metrics import SAMPLES, gradcheck_elements, with_errors
from mucudnn.measuring.whole_runs import Machine
from mucudnn.words.errors import InvalidInputError, first_line
from mucudnn.words.problem import Operation, dtype_name
from mucudnn.words.progress import Progress, silent
from mucudnn.words.values import did_you_mean

WHOLE = "."  # the name of the model itself
MODULE = "module"  # the name of the contestant
_COLUMNS = ("layer", "operation", "batch_size", "dtype")
_STEP = 1e-5  # step of the finite differences, relative to the norm of the moved tensors


@dataclass(frozen=True, slots=True)
class Called:
    """A module and its arguments; the first floating-point argument is the input whose gradient is measured."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    @property
    def inputs(self) -> list[Tensor]:
        """The floating-point tensors among the arguments; the first is the input whose gradient is measured."""
        return _floating((self.arguments, dict(self.named)))

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trainable parameters of the module, by name."""
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def computed(self) -> Tensor:
        """Call the module and return its floating-point output; several outputs are flattened and concatenated.

        Raises any error of the module.
        """
        return _output(self.module(*self.arguments, **self.named))

    def computed_with(self, operation: Operation, moved: Sequence[Tensor]) -> Tensor:
        """Return the module's output, with ``moved`` in place of the tensors whose gradient the operation computes."""
        if operation is Operation.BACKWARD_FILTER:
            own = dict(zip(self.parameters, moved, strict=True))
            return _output(functional_call(self.module, own, self.arguments, dict(self.named)))
        x = self.inputs[0]
        given, named = tree_map(lambda value: moved[0] if value is x else value, (self.arguments, dict(self.named)))
        return _output(self.module(*given, **named))

    def moved(self, operation: Operation) -> list[Tensor]:
        """Return the tensors whose gradient the operation computes: the input or the parameters; empty for forward."""
        x = self.inputs[0].requires_grad_(operation is Operation.BACKWARD_DATA)
        by_operation = {Operation.BACKWARD_DATA: [x], Operation.BACKWARD_FILTER: [*self.parameters.values()]}
        return by_operation.get(operation, [])

    def call_of(self, operation: Operation) -> Callable[[], Tensor]:
        """Return the function to be timed: a call of the module, or a backward pass after an untimed forward pass."""
        moved = self.moved(operation)
        if operation is Operation.FORWARD:
            return self.computed
        with torch.enable_grad():
            y = self.computed()
        return partial(_gradient, y, moved, _direction(y.detach()))

    def copied(self, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Called:
        """Return a copy of the module and its arguments, with ``change`` applied to each floating-point tensor."""

        def changed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return change(value.detach()) if value.is_floating_point() else value.detach()

        own = copy.deepcopy(self.module)
        with torch.no_grad():
            for place in chain(own.parameters(), own.buffers()):
                if place.is_floating_point():
                    place.data = change(place.data)
        return Called(own, tree_map(changed, self.arguments), tree_map(changed, dict(self.named)))

    def first_samples(self) -> Called:
        """Return a copy of the module and its arguments, with the batch reduced to its first ``SAMPLES`` samples."""
        n = len(self.inputs[0])

        def cut(one: Any) -> Any:
            return one[:SAMPLES].clone() if isinstance(one, Tensor) and one.ndim and len(one) == n else one

        few = self.copied()
        return Called(few.module, tree_map(cut, few.arguments), tree_map(cut, few.named))


def called_module(model: nn.Module, name: str, arguments: tuple[Tensor, ...]) -> Called:
    """Return a module of a model, with the arguments that it receives when the model is called.

    name: as in ``named_modules``; ``WHOLE`` is the model itself. If a module is called several times, its first call
    is used. The model is left in eval mode. Raises ``InvalidInputError`` if there is no such module or it is not called
    with a floating-point tensor, and any error of the model.
    """
    by_name = {place or WHOLE: module for place, module in model.eval().named_modules()}
    if name not in by_name:
        hint = did_you_mean(name, by_name)
        raise InvalidInputError(f"the model has no module {name!r}; {hint}{WHOLE} is the whole model")
    found: list[Called] = []

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not found:
            found.append(Called(module, given, named).copied())

    handle = by_name[name].register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            model(*arguments)
    finally:
        handle.remove()
    if not found or not found[0].inputs:
        raise InvalidInputError(f"{name} is not called with a floating tensor when the model is called")
    return replace(found[0], module=by_name[name])


def benchmark_module(
    source: str,
    name: str,
    called: Called,
    options: MetricsOptions,
    out: Path,
    *,
    machine: Machine,
    progress: Progress = silent,
) -> None:
    """Measure accuracy and time of a module; write rows into ``out``, skipping operations that it already has.

    options: the algorithms and configurations are ignored. A module without trainable parameters has no row for
    backward filter.

    Raises the errors of ``open_folder``, and ``InvalidInputError`` if the module cannot be copied to float64 or the
    copy fails.
    """
    operations = [one for one in options.operations if one is not Operation.BACKWARD_FILTER or called.parameters]
    x = called.inputs[0]
    settings = {
        "layer": name,
        "input_shape": list(x.shape),
        "dtype": dtype_name(x.dtype),
        "operations": [str(operation) for operation in operations],
        "rounds": options.rounds,
        "runs": options.runs,
    }
    header = Header(*("metrics", source, settings, machine.environment), _COLUMNS, wanted=len(operations))
    exact = _exact(called)

    def rows_of(operation: Operation, subject: Subject, progress: Progress) -> list[Row]:
        progress(f"{name}, {operation}", 0.0)
        return timed([_untimed(subject, called, exact, operation, options.runs)], options, machine)

    samples, dtype = len(x) if x.ndim else 1, dtype_name(x.dtype)
    wanted = {(name, str(operation), samples, dtype): partial(rows_of, operation) for operation in operations}
    write_missing(out, header, wanted, progress, machine.watch)


def _exact(called: Called) -> Called:
    try:
        exact = called.copied(Tensor.double)
        exact.computed()
    except Exception as error:  # the user's code can raise anything
        raise InvalidInputError(
            f"the module does not run in float64, which is the reference: {type(error).__name__}: {first_line(error)}"
        ) from error
    return exact


def _untimed(subject: Subject, called: Called, exact: Called, operation: Operation, runs: int) -> Untimed:
    row = Row(subject, MODULE)
    try:
        call, expected = called.call_of(operation), exact.call_of(operation)().detach()
        gradients: dict[str, Any] = {"gradient_error": nan, "gradcheck": None}
        if operation is not Operation.FORWARD:
            gradients = {
                "gradient_error": _directional_error(exact, operation, call().detach(), expected),
                "gradcheck": _gradcheck(exact, operation),
            }
        return Untimed(with_errors(replace(row, more=gradients), call, expected, runs), (call,))
    except Exception as error:  # the user's code can raise anything
        return Untimed(replace(row, failure=first_line(error)))


def _directional_error(exact: Called, operation: Operation, own: Tensor, right: Tensor) -> float:
    """Return the relative error of the module's derivative along the exact gradient, against central differences.

    own: the module's gradient. right: the gradient of ``exact``, the float64 copy that computes the differences.
    """
    own, right = own.double().flatten(), right.flatten()
    moved = [tensor.detach() for tensor in exact.moved(operation)]
    length = float(torch.linalg.vector_norm(_joined(moved))) or 1.0
    step = right * (_STEP * length / (float(torch.linalg.vector_norm(right)) or 1.0))
    parts = torch.split(step, [tensor.numel() for tensor in moved])
    steps = [part.view(tensor.shape) for part, tensor in zip(parts, moved, strict=True)]
    with torch.no_grad():
        v = _direction(exact.computed())
        after, before = (
            exact.computed_with(operation, [at + sign * by for at, by in zip(moved, steps, strict=True)])
            for sign in (1, -1)
        )
    difference = float(((after - before) * v).sum()) / 2
    return abs(float((own * step).sum()) / difference - 1) if difference else nan


def _gradcheck(exact: Called, operation: Operation) -> str:
    """Run torch's gradcheck on ``SAMPLES`` samples in float64, on random elements if the module is large.

    Return ``PASSED`` or the failure, as a text.
    """
    if exact.inputs[0].device.type != "cpu":
        return "not done: it runs on the CPU"
    few = exact.first_samples()
    return gradcheck_elements(partial(few.computed_with, operation), few.moved(operation))


def _gradient(y: Tensor, moved: list[Tensor], v: Tensor) -> Tensor:
    found = torch.autograd.grad(y, moved, v, retain_graph=True, allow_unused=True)
    whole = [torch.zeros_like(of) if one is None else one for one, of in zip(found, moved, strict=True)]
    return whole[0] if len(whole) == 1 else _joined(whole)


def _direction(y: Tensor) -> Tensor:
    """Return a random gradient of the loss by the output ``y``: normally distributed, the same for every dtype."""
    drawn = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return drawn.to(dtype=y.dtype, device=y.device)


def _output(result: Any) -> Tensor:
    found = _floating(result)
    if not found:
        raise InvalidInputError("the module returns no floating tensor, so that there is nothing to compare")
    return found[0] if len(found) == 1 else _joined(found)


def _floating(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor) and one.is_floating_point()]


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
