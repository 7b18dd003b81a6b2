"""The three convolutions as torch operators: ``mucudnn::conv2d``, ``conv2d_backward_data``, ``conv2d_backward_filter``.

All three touch the same tensors x, w and y (or dy), and each is the derivative of the others: so gradients of any order
are again these operators, and are tuned as well. Which configuration runs is looked up by the integer ``tuning``, the
handle of a ``Choices``. Where there is none (other shape, larger batch, other dtype, unknown handle, handle 0),
the operators are torch's own convolution. They have no forward-mode derivative and no rules for ``torch.func``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._ops import OpOverload

from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.kernels.contract.out_of_memory import is_out_of_memory
from mucudnn.kernels.torch_ops.torch_convolution import torch_convolution
from mucudnn.running.autocast import autocast_computes
from mucudnn.running.devices import made_current
from mucudnn.running.dispatcher import untouched
from mucudnn.running.eager.hot_path import run_known
from mucudnn.running.executable import (
    Executable,
    ExecutableKey,
    ExecutableSource,
    StepError,
    executable_of,
    forget,
    note_failure,
    working_executable,
)
from mucudnn.running.fallback import note_lack_of_memory
from mucudnn.running.flops import count_flops
from mucudnn.running.workspace import make_room, on_huge_pages
from mucudnn.words.errors import InvalidInputError, MisalignedError, UnavailableError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration
from mucudnn.words.warning import say_once

UNTUNED = 0  # handle of no choices
_INSTEAD = "torch's own convolution runs instead"


class Choices:
    """Configurations that were chosen on one type of device: one for each problem and batch size.

    Immutable, made by ``Choices.of``. On other devices and for other problems torch's own convolution runs.

    handle: names the contents and not the object. It is the same in every process: a graph that ``torch.compile``
    stored, a copy and a pickle (which registers itself when it is loaded) all find it again. x_shapes: the
    (N, C, H, W) for which there is any configuration. keeps_workspace: whether the CPU's workspace outlives a call;
    else it is there only while a convolution runs. limit_bytes: what it has then and what is allocated inside must not
    exceed together; ``None``: there is no limit. beside_torchs: the most that it may have beside torch's own, where
    that was chosen, by operation.
    """

    __slots__ = (
        "beside_torchs",
        "configurations",
        "device_type",
        "executables",
        "handle",
        "keeps_workspace",
        "limit_bytes",
        "x_shapes",
    )

    def __init__(
        self,
        configurations: Mapping[ConvProblem, Mapping[int, Configuration]],
        device_type: str,
        keeps_workspace: bool,
        limit_bytes: int | None = None,
    ) -> None:
        self.configurations = {p: dict(by_size) for p, by_size in configurations.items()}
        self.device_type, self.keeps_workspace, self.limit_bytes = device_type, keeps_workspace, limit_bytes
        self.handle = _digest(self.configurations, f"{device_type}, {keeps_workspace}, {limit_bytes}")
        self.beside_torchs: dict[Operation, int] = {}
        for problem, by_size in self.configurations.items():
            needed = [chosen.workspace_bytes for chosen in by_size.values() if chosen.is_baseline]
            if limit_bytes is not None and needed:
                self.beside_torchs[problem.operation] = limit_bytes - max(needed)
        self.x_shapes = frozenset(p.x_shape(n) for p, by_size in self.configurations.items() for n in by_size)
        self.executables: dict[ExecutableKey, Executable | None] = {}

    @classmethod
    def of(
        cls,
        configurations: Mapping[ConvProblem, Mapping[int, Configuration]],
        device_type: str = "cpu",
        keeps_workspace: bool = True,
        limit_bytes: int | None = None,
    ) -> Choices:
        """Register choices, problem -> batch size -> configuration; the same contents give the same object."""
        choices = cls(configurations, device_type, keeps_workspace, limit_bytes)
        return _registered.setdefault(choices.handle, choices)

    def __reduce__(self) -> tuple[Any, ...]:
        return Choices.of, (self.configurations, self.device_type, self.keeps_workspace, self.limit_bytes)

    def configuration(self, problem: ConvProblem, n: int) -> Configuration | None:
        """Look up what was chosen; ``None``: torch's own convolution."""
        chosen = self.configurations.get(problem, {}).get(n)
        return None if chosen is None or chosen.is_baseline else chosen

    def executable(self, problem: ConvProblem, n: int) -> Executable | None:
        """Make the configuration ready to run on the current device. Raises as ``working_executable``."""
        configuration = self.configuration(problem, n)
        if configuration is None:
            return None
        executable = working_executable(problem, configuration, self.device_type, keeps_workspace=self.keeps_workspace)
        return executable if executable is None or self.limit_bytes is None else _within(self.limit_bytes, executable)


def _within(limit_bytes: int, executable: Executable) -> Executable:
    """Return the same with a kept workspace that is within a limit beside what is allocated inside."""
    scratch = min(algorithm.workspace(executable.problem, n).scratch_bytes for algorithm, n in executable.steps)
    handed = scratch + sum(stage.prepared.stop - stage.prepared.start for stage in executable.stages)
    internal_bytes = executable.configuration.workspace_bytes - handed
    return replace(executable, most_kept_bytes=limit_bytes - internal_bytes) if internal_bytes > 0 else executable


_registered: dict[int, Choices] = {}


class Measured:
    """One configuration under a handle of its own, as it is timed: what fails is an error, and nothing replaces it.

    The handle is negative, and free again when the object is gone. Errors of making the executable ready are
    raised here.
    """

    def __init__(
        self, problem: ConvProblem, configuration: Configuration, device_type: str, keeps_workspace: bool
    ) -> None:
        self.device_type, self.handle = device_type, -next(_numbers)
        self.executables: dict[ExecutableKey, Executable | None] = {}
        self._executable = Executable.of(
            problem, configuration, device_type=device_type, keeps_workspace=keeps_workspace
        )
        self._executable.build()
        _measured[self.handle] = self

    def executable(self, problem: ConvProblem, n: int) -> Executable | None:
        """Return the one that there is; ``None`` for another number of samples."""
        return self._executable if n == self._executable.configuration.batch_size else None


_measured: WeakValueDictionary[int, Measured] = WeakValueDictionary()
_numbers = count(1)


def _digest(configurations: Mapping[ConvProblem, Mapping[int, Configuration]], how: str) -> int:
    """Hash what would run, and how, to 63 bits; never ``UNTUNED``."""
    lines = sorted(
        f"{p!r} {n} {c.micro_configs!r}" for p, by_size in configurations.items() for n, c in by_size.items()
    )
    digest = hashlib.blake2b("\n".join((how, *lines)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 1) or 1


def computed(
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    choices: ExecutableSource,
    epilogue: Epilogue | None = None,
) -> Tensor | None:
    """Compute a call as it was tuned, newly allocated; ``None`` where nothing is tuned, or it cannot be done now.

    x: (N, C, H, W), w: (K, C // groups, R, S). third: the bias, (K,) or None, in FORWARD; else dy, (N, K, P, Q). Of the
    tensor that is written only shape and strides matter. Autograd takes no note of it: call it where gradients are
    switched off, or below autograd. A step may be torch's own convolution of a part of the mini-batch. epilogue: of y,
    in FORWARD; ``None`` too where no algorithm that was chosen computes it.

    A call of which a step fails starts anew with what runs in its place; each failure is remembered, so that it ends.
    """
    executable = None
    while True:
        try:
            call = choices.executables, operation, x, w, third, stride, padding, dilation, groups
            result: Tensor | None = NotImplemented if epilogue is not None else run_known(*call)
            if result is not NotImplemented:
                return result
            executable = executable_of(choices, operation, x, w, third, stride, padding, dilation, groups)
            if executable is None:
                return None
            return _run(executable, x, w, third) if epilogue is None else _run_fused(executable, x, w, third, epilogue)
        except MisalignedError:
            return None
        except StepError as error:
            if error.is_lack_of_memory:
                say_once(f"{error.problem}: {error}; {_INSTEAD}")
                return None
            note_failure(error, x.device)
            forget(choices, executable)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            tuned_for = f"{operation}, x {tuple(x.shape)}, w {tuple(w.shape)}"
            note_lack_of_memory(f"no memory for what was tuned for {tuned_for}; {_INSTEAD}", x.device)
            return None
        except UnavailableError as error:
            say_once(f"{error}; {_INSTEAD}")
            return None


def _computed(
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    tuning: int,
) -> Tensor:
    """Compute what the operation writes, newly allocated. third: bias or dy. tuning: a handle."""
    choices = _registered.get(tuning) if tuning >= UNTUNED else _measured[tuning]
    return values(operation, x, w, third, stride, padding, dilation, groups, choices)


def values(
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    choices: Choices | Measured | None,
) -> Tensor:
    """Compute what ``computed`` does, and torch's own where that is ``None``. ``Measured`` raises whatever fails."""
    if isinstance(choices, Measured):
        return as_measured(operation, x, w, third, stride, padding, dilation, groups, choices)
    if choices is not None:
        result = computed(operation, x, w, third, stride, padding, dilation, groups, choices)
        if result is not None:
            return result
        if choices.beside_torchs:
            make_room(choices.beside_torchs.get(operation, inf))
    dy, bias = (None, third) if operation is Operation.FORWARD else (third, None)
    return torch_convolution(operation, x, w, dy, bias, stride, padding, dilation, groups)


def as_measured(
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    measured: Measured,
    epilogue: Epilogue | None = None,
) -> Tensor:
    """Compute a call by the executable that is measured, as ``computed`` does. Raises whatever fails.

    epilogue: of y, in FORWARD: computed by the executable, or after it, in place, where that does not take it.
    """
    call = operation, x, w, third, stride, padding, dilation, groups
    result: object = None if epilogue is not None else run_known(measured.executables, *call)
    if isinstance(result, Tensor):
        return result
    executable = executable_of(measured, *call)
    if executable is None:
        raise InvalidInputError(f"what is measured does not fit {operation}, x {tuple(x.shape)}, w {tuple(w.shape)}")
    if epilogue is None:
        return _run(executable, x, w, third)
    y = _run_fused(executable, x, w, third, epilogue)
    return epilogue.apply(_run(executable, x, w, third)) if y is None else y


def _run_fused(executable: Executable, x: Tensor, w: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor | None:
    """Compute y with an epilogue; ``None`` where the executable does not take it."""
    if not executable.takes(epilogue, x):
        return None
    with untouched, made_current(x.device):
        return run_forward(executable, x, w, bias, None, epilogue)


def _run(executable: Executable, x: Tensor, w: Tensor, third: Tensor | None) -> Tensor:
    if executable.bound is not None:
        return executable.bound(x, w, third)
    with untouched, made_current(x.device):  # a step may be torch's own convolution
        return _RUNS[executable.problem.operation](executable, x, w, third)


def run_forward(
    executable: Executable,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    cached: Tensor | None = None,
    epilogue: Epilogue | None = None,
) -> Tensor:
    """Compute y, newly allocated, by an executable that fits the tensors. cached, epilogue: as for ``execute``."""
    bound = executable.bound_in_python
    if bound is not None and (epilogue is None or all(stage.fuses for stage in executable.stages)):
        return bound(x, w, bias, cached, epilogue)
    torch_format = TORCH_FORMATS[executable.problem.memory_format]
    y = on_huge_pages(
        torch.empty(executable.problem.y_shape(len(x)), dtype=x.dtype, device=x.device, memory_format=torch_format)
    )
    x, w = x.contiguous(memory_format=torch_format), w.contiguous(memory_format=torch_format)
    if epilogue is not None and epilogue.added is not None:
        epilogue = Epilogue(epilogue.activation, epilogue.added.contiguous(memory_format=torch_format))
    executable.execute(x, w, y, None if bias is None else bias.contiguous(), cached, epilogue)
    return y


def _run_backward_data(executable: Executable, x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    torch_format = TORCH_FORMATS[executable.problem.memory_format]
    dx = on_huge_pages(torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch_format))
    executable.execute(dx, w.contiguous(memory_format=torch_format), dy.contiguous(memory_format=torch_format))
    return dx


def _run_backward_filter(executable: Executable, x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    torch_format = TORCH_FORMATS[executable.problem.memory_format]
    dw = on_huge_pages(torch.empty(w.shape, dtype=w.dtype, device=w.device, memory_format=torch_format))
    executable.execute(x.contiguous(memory_format=torch_format), dw, dy.contiguous(memory_format=torch_format))
    return dw


_RUNS: dict[Operation, Callable[..., Tensor]] = {
    Operation.FORWARD: run_forward,
    Operation.BACKWARD_DATA: _run_backward_data,
    Operation.BACKWARD_FILTER: _run_backward_filter,
}


def _torchs(operation: Operation) -> Callable[..., Tensor]:
    """Give torch's convolution an operator's signature: on fake tensors it tells shape and strides."""
    if operation is Operation.FORWARD:
        return lambda x, w, bias, *rest: torch_convolution(operation, x, w, None, bias, *rest[:-1])
    return lambda x, w, dy, *rest: torch_convolution(operation, x, w, dy, None, *rest[:-1])


def bias_gradient(dy: Tensor) -> Tensor:
    """Sum dy, (N, K, P, Q), to (K,). Looked up in every call, as ``computed``: ``in_place`` puts itself around both."""
    return dy.sum((0, 2, 3))


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, dy, *ctx.rest = inputs
    ctx.save_for_backward(x, w, dy)


def _save_for_conv2d(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, *ctx.rest = inputs
    ctx.save_for_backward(x, w)  # not the bias, which may be changed in place before the backward pass


def _conv2d_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    of_x, of_w, of_bias = ctx.needs_input_grad[:3]
    dx = conv2d_backward_data(x, w, dy, *ctx.rest) if of_x else None
    dw = conv2d_backward_filter(x, w, dy, *ctx.rest) if of_w else None
    return dx, dw, bias_gradient(dy) if of_bias else None, *(None for _ in ctx.rest)


def _backward_data_gradients(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    """Differentiate dx by w and dy. g: (N, C, H, W), the gradient of dx. x has none: it lends its shape."""
    _, w, dy = ctx.saved_tensors
    _, of_w, of_dy = ctx.needs_input_grad[:3]
    dw = conv2d_backward_filter(g, w, dy, *ctx.rest) if of_w else None
    return None, dw, conv2d(g, w, None, *ctx.rest) if of_dy else None, *(None for _ in ctx.rest)


def _backward_filter_gradients(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    """Differentiate dw by x and dy. g: (K, C // groups, R, S), the gradient of dw. w has none: it lends its shape."""
    x, _, dy = ctx.saved_tensors
    of_x, _, of_dy = ctx.needs_input_grad[:3]
    dx = conv2d_backward_data(x, g, dy, *ctx.rest) if of_x else None
    return dx, None, conv2d(x, g, None, *ctx.rest) if of_dy else None, *(None for _ in ctx.rest)


def _define(operation: Operation, name: str, gradients: Callable[..., Any]) -> OpOverload[..., Tensor]:
    forward, qualified = operation is Operation.FORWARD, f"mucudnn::{name}"
    operands = "Tensor x, Tensor w, Tensor? bias" if forward else "Tensor x, Tensor w, Tensor dy"
    rest = "SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, SymInt groups, int tuning"
    _library.define(f"{name}({operands}, {rest}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, lambda *arguments: _computed(operation, *arguments), "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, _torchs(operation), lib=_library)
    save = _save_for_conv2d if forward else _save_all
    torch.library.register_autograd(qualified, gradients, setup_context=save, lib=_library)
    operator = getattr(torch.ops.mucudnn, name)
    count_flops(operation, operator)
    overload: OpOverload[..., Tensor] = operator.default
    return overload


_library: Any = torch.library.Library("mucudnn", "DEF")  # type: ignore[no-untyped-call]
conv2d = _define(Operation.FORWARD, "conv2d", _conv2d_gradients)
conv2d_backward_data = _define(Operation.BACKWARD_DATA, "conv2d_backward_data", _backward_data_gradients)
conv2d_backward_filter = _define(Operation.BACKWARD_FILTER, "conv2d_backward_filter", _backward_filter_gradients)
autocast_computes(_library, "conv2d", conv2d)


def choices_of(handle: int) -> Choices | None:
    """Find the choices of a handle; ``None``: there are none in this process."""
    return _registered.get(handle)
