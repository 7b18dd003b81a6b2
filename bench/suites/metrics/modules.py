"""Measures a module of a model, whatever it computes, into a result folder, with the metrics of operators.

It is called with what the model calls it with. The reference is a copy in float64, which computes the same with all
that the module is made of. Modules are in eval mode: dropout would draw other numbers for both.

The rows are called as those of a convolution: forward is the output, backward data the gradient of the input, and
backward filter those of all parameters together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import chain
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from mucudnn.bench.contests.timing import Contestant, TurnRounds, try_in_turns
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import open_folder
from mucudnn.bench.suites.metrics.benchmark import MOST_ROUNDS, RULE, SHORT_S, Choices
from mucudnn.bench.suites.metrics.elements import gradcheck_elements
from mucudnn.bench.suites.metrics.errors import ErrorNorms, distinct_results, error_map
from mucudnn.bench.suites.metrics.gradients import SAMPLES
from mucudnn.measuring.whole_runs import Machine
from mucudnn.words.errors import InvalidInputError, first_line
from mucudnn.words.problem import Operation, dtype_name
from mucudnn.words.progress import Progress, silent

WHOLE = "."  # name of the model itself
MODULE = "module"  # the contestant
_COLUMNS = ("layer", "operation", "batch_size", "dtype")
_STEP = 1e-5  # of differences, beside the length of what is moved


@dataclass(frozen=True, slots=True)
class Called:
    """A module, and what it is called with: its first floating tensor is the input whose gradient is measured."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that it is called with, as far as they are floating, the input first."""
        return _floating((self.arguments, dict(self.named)))

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def computed(self) -> Tensor:
        """Return all floating outputs, one after another; as it is, where there is one. Raises what the module does."""
        return _compared(self.module(*self.arguments, **self.named))

    def computed_with(self, operation: Operation, moved: Sequence[Tensor]) -> Tensor:
        """Return the same with other tensors in place of those whose gradient the operation is."""
        if operation is Operation.BACKWARD_FILTER:
            names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
            own = dict(zip(names, moved, strict=True))
            return _compared(functional_call(self.module, own, self.arguments, dict(self.named)))
        x = self.inputs[0]
        given, named = tree_map(lambda value: moved[0] if value is x else value, (self.arguments, dict(self.named)))
        return _compared(self.module(*given, **named))

    def copied(self, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Called:
        """Copy the module, and what it is called with, each floating tensor of both changed."""

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


def called_module(model: nn.Module, name: str, arguments: tuple[Tensor, ...]) -> Called:
    """Find out what a module of a model is called with, the first time, when the model is called.

    name: as ``named_modules`` has it, ``WHOLE``: the model itself. The model is left in eval mode. Raises
    ``InvalidInputError`` where there is no such module, or it is not called with a floating tensor, and what the model
    raises.
    """
    by_name = {place or WHOLE: module for place, module in model.eval().named_modules()}
    if name not in by_name:
        close = get_close_matches(name, by_name, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
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
    return Called(by_name[name], found[0].arguments, found[0].named)


def benchmark_module(
    source: str,
    name: str,
    called: Called,
    choices: Choices,
    out: Path,
    *,
    machine: Machine,
    progress: Progress = silent,
) -> None:
    """Measure a module into the folder ``out``; what it has already is not measured again.

    choices: its algorithms and configurations do not count. A module without a parameter that is trained has no
    backward filter.

    Raises what ``open_folder`` raises, and ``InvalidInputError`` where there is no copy in float64, or that fails.
    """
    operations = [one for one in choices.operations if one is not Operation.BACKWARD_FILTER or called.parameters]
    x = called.inputs[0]
    settings = {
        "layer": name,
        "input_shape": list(x.shape),
        "dtype": dtype_name(x.dtype),
        "operations": [str(operation) for operation in operations],
        "rounds": choices.rounds,
        "runs": choices.runs,
    }
    header = Header(
        *("metrics", source, settings, machine.environment), subject_columns=_COLUMNS, wanted=len(operations)
    )
    exact = _exact(called)
    with open_folder(out, header) as folder:
        for index, operation in enumerate(operations):
            values = (name, str(operation), len(x) if x.ndim else 1, dtype_name(x.dtype))
            subject = dict(zip(_COLUMNS, values, strict=True))
            if not folder.known(subject):
                progress(f"{name}, {operation}", index / len(operations))
                mark = machine.watch.mark()
                row = _row(subject, _Measured(called, exact, operation), choices, machine)
                folder.add([row], machine.watch.since(mark))
        folder.write_summary()


def _exact(called: Called) -> Called:
    try:
        exact = called.copied(Tensor.double)
        exact.computed()
    except Exception as error:  # the user's code can raise anything
        raise InvalidInputError(
            f"the module cannot be computed in float64, with which it is compared: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    return exact


def _row(subject: Subject, measured: _Measured, choices: Choices, machine: Machine) -> Row:
    """Measure one operation. One that fails has a row with the reason."""
    try:
        call = measured.call()
        first, expected = call().detach(), measured.expected()
        norms = ErrorNorms.of(first, expected)
        again = (call().detach() for _ in range(choices.runs - 1))
        more = {
            **{"error_l1": norms.l1, "error_l2": norms.l2, "error_max": norms.largest},
            "error_map": error_map(first, expected) if first.ndim == 4 else None,
            **measured.gradients(),
            **{
                "runs": choices.runs,
                "distinct_results": distinct_results(chain([first], again)),
                "alone_samples_s": [],
            },
        }
    except Exception as error:  # the user's code can raise anything
        return Row(subject, MODULE, failure=first_line(error))
    rounds = TurnRounds(choices.rounds, max(choices.rounds, MOST_ROUNDS), SHORT_S)
    (time,) = try_in_turns([Contestant(call)], rounds, machine.clock, RULE)
    if isinstance(time, Exception):
        return Row(subject, MODULE, failure=first_line(time))
    return Row(subject, MODULE, time.samples_s, relative_error=norms.relative, more=more)


@dataclass(frozen=True, slots=True)
class _Measured:
    """One operation of a module, and the module in float64."""

    called: Called
    exact: Called
    operation: Operation

    def call(self) -> Callable[[], Tensor]:
        """Make ready what is timed: the call, as in training, or autograd's of a forward pass that was made before."""
        return _call(self.called, self.operation)

    def expected(self) -> Tensor:
        return _call(self.exact, self.operation)().detach()

    def gradients(self) -> dict[str, Any]:
        if self.operation is Operation.FORWARD:
            return {"gradient_error": nan, "gradcheck": None}
        return {"gradient_error": self._directional_error(), "gradcheck": self._gradcheck()}

    def _directional_error(self) -> float:
        """Return the relative error of the derivative along the exact gradient, against central differences.

        The differences are of the float64 copy, whose step is a small part of what is moved.
        """
        own, right = _call(self.called, self.operation)().detach().double().flatten(), self.expected().flatten()
        moved = _moved(self.exact, self.operation)
        length = float(torch.linalg.vector_norm(_joined(moved).detach())) or 1.0
        step = right * (_STEP * length / (float(torch.linalg.vector_norm(right)) or 1.0))
        before, ends = [tensor.detach().clone() for tensor in moved], []
        with torch.no_grad():
            v = _direction(self.exact.computed())
            for sign in (1, -1):
                for tensor, was, by in zip(moved, before, _split(step, moved), strict=True):
                    tensor.copy_(was + sign * by)
                ends.append(float((self.exact.computed() * v).sum()))
            for tensor, was in zip(moved, before, strict=True):
                tensor.copy_(was)
        difference = (ends[0] - ends[1]) / 2
        return abs(float((own * step).sum()) / difference - 1) if difference else nan

    def _gradcheck(self) -> str:
        """Run torch's gradcheck in float64, on ``SAMPLES`` samples; of a large module on elements that are drawn."""
        if self.exact.inputs[0].device.type != "cpu":
            return "not done: it runs on the CPU"
        n = len(self.exact.inputs[0])
        few = self.exact.copied(lambda tensor: tensor)
        few = Called(few.module, *(_first(value, n) for value in (few.arguments, few.named)))
        return gradcheck_elements(partial(few.computed_with, self.operation), _moved(few, self.operation))


def _call(called: Called, operation: Operation) -> Callable[[], Tensor]:
    moved = _moved(called, operation)
    if operation is Operation.FORWARD:
        return called.computed
    with torch.enable_grad():
        y = called.computed()
    return partial(_gradient, y, moved, _direction(y.detach()))


def _gradient(y: Tensor, moved: list[Tensor], v: Tensor) -> Tensor:
    found = torch.autograd.grad(y, moved, v, retain_graph=True, allow_unused=True)
    whole = [torch.zeros_like(of) if one is None else one for one, of in zip(found, moved, strict=True)]
    return whole[0] if len(whole) == 1 else _joined(whole)


def _moved(called: Called, operation: Operation) -> list[Tensor]:
    """Return the tensors whose gradient the operation is; of forward none. They are leaves that require it."""
    x = called.inputs[0].requires_grad_(operation is Operation.BACKWARD_DATA)
    return {Operation.BACKWARD_DATA: [x], Operation.BACKWARD_FILTER: called.parameters}.get(operation, [])


def _direction(y: Tensor) -> Tensor:
    """Return the gradient of the loss by the output: the same numbers for every dtype, of a normal distribution."""
    drawn = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return drawn.to(dtype=y.dtype, device=y.device)


def _first(value: Any, n: int) -> Any:
    """Return the first ``SAMPLES`` samples of tensors that have n."""

    def cut(one: Any) -> Any:
        return one[:SAMPLES].clone() if isinstance(one, Tensor) and one.ndim and len(one) == n else one

    return tree_map(cut, value)


def _floating(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor) and one.is_floating_point()]


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _compared(result: Any) -> Tensor:
    found = _floating(result)
    if not found:
        raise InvalidInputError("the module returns no floating tensor, so that there is nothing to compare")
    return found[0] if len(found) == 1 else _joined(found)


def _split(joined: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = torch.split(joined, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
