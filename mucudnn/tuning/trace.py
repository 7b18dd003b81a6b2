"""The convolutions that a model computes, found by running it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mucudnn.core.errors import no_images
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.memory import suggests_channels_last
from mucudnn.running.modules import OURS, padded
from mucudnn.running.problems import problem_of_call, problem_operation, torchs_memory_format

TRACED = tuple(OURS)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one convolution module in a run of the model.

    problem: the problem that the call computes: forward, or backward data for a transposed convolution, whose result is
    the x of the problem.
    input_needs_gradient: whether autograd would compute dx.
    has_bias: whether the module adds a bias.
    """

    name: str
    problem: ConvProblem
    batch_size: int
    input_needs_gradient: bool
    has_bias: bool

    @property
    def is_transposed(self) -> bool:
        return self.problem.operation is Operation.BACKWARD_DATA

    def problem_of(self, operation: Operation) -> ConvProblem:
        """Return the problem that computes the module's y, dx or dw.

        operation: of the module, not of the problem.

        >>> from torch import nn
        >>> (call,) = trace(nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1), torch.zeros(4, 8, 16, 16))
        >>> print(call.problem_of(Operation.FORWARD))
        backward_data 3x32x32 -> 8, 4x4, stride 2x2, padding 1x1, float32 contiguous
        """
        return self.problem.with_operation(problem_operation(operation, transposed=self.is_transposed))


def trace(model: nn.Module, sample_input: Any) -> list[Call]:
    """List the calls of all convolution modules in ``model(sample_input)``, in order, as torch computes them.

    Convolution modules are ``nn.Conv2d``, ``nn.Conv3d``, ``nn.Conv1d`` (as images of height 1) and those that transpose
    them, also subclasses whose ``forward`` calls theirs: x is then what their ``forward`` gets.

    sample_input: the only argument, or a tuple of all positional ones. Padding that torch does as a separate step
    (``padding_mode`` other than zeros, the odd half of ``padding="same"``) is part of H and W. Calls that no
    ``ConvProblem`` describes are left out: empty or too large batches, and unsupported dtypes.

    The forward pass is a real one, in the model's mode: running statistics and random numbers advance. Raises errors of
    the model, and ``InvalidInputError`` if convolutions are called, but all without images.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
    >>> [(call.name, call.batch_size, str(call.problem)) for call in trace(model, torch.zeros(4, 3, 32, 32))]
    [('0', 4, 'forward 3x32x32 -> 8, 3x3, padding 1x1, float32 contiguous')]
    """
    calls: list[Call] = []
    empty: list[str] = []

    def record(name: str, module: nn.Module, compute: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
        call = call_of(name, module, arguments, named)
        if call is not None:
            calls.append(call)
        elif arguments and isinstance(arguments[0], Tensor) and arguments[0].shape[:1] == (0,):
            empty.append(name)
        return compute(*arguments, **named)

    with observed(model, record):
        model(*(sample_input if isinstance(sample_input, tuple) else (sample_input,)))
    if empty and not calls:
        raise no_images(empty[0])
    return calls


@contextmanager
def observed(model: nn.Module, observe: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the convolutions of the model's modules by ``observe(name, module, compute, *arguments, **named)``.

    ``compute(*arguments, **named)`` is the method that tuned modules override: ``_conv_forward``, which gets what the
    ``forward`` of a subclass makes of its arguments, or the ``forward`` of a transposed convolution.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, TRACED):
                method = "forward" if isinstance(module, _ConvTransposeNd) else "_conv_forward"
                attributes = vars(module)
                stack.callback(attributes.update, {method: attributes[method]} if method in attributes else {})
                stack.callback(attributes.pop, method)
                attributes[method] = partial(observe, name, module, getattr(module, method))
        yield


def call_of(name: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Call | None:
    """Return a description of a call that was observed; None if no ``ConvProblem`` describes it."""
    assert isinstance(module, _ConvNd)
    x = arguments[0] if arguments else named.get("input")
    if not isinstance(x, Tensor):
        return None  # torch raises the error
    dims = 2 + len(module.kernel_size)
    images = x.unsqueeze(0) if x.dim() == dims - 1 else x
    if images.dim() != dims:
        return None
    kind = "output_size" if isinstance(module, _ConvTransposeNd) else "weight"
    problem = _problem(module, images, arguments[1] if len(arguments) > 1 else named.get(kind))
    if problem is None:
        return None
    return Call(name, problem, len(images), x.requires_grad, module.bias is not None)


def _problem(module: nn.Module, x: Tensor, second: Any) -> ConvProblem | None:
    """Return the problem of a module's call with x; None if the call is invalid or not supported.

    Torch reports the errors of invalid calls.

    second: the filter, or the output size of a transposed convolution.
    """
    assert isinstance(module, _ConvNd)
    padding: Any = module.padding
    shape, w, dims = x.shape, second, len(module.kernel_size)
    output_padding = [0] * dims
    try:
        if isinstance(module, _ConvTransposeNd):
            if not isinstance(second, (list, tuple, type(None))):
                return None  # an argument with another meaning, in a subclass
            w, sizes = module.weight, None if second is None else list(second[-dims:])
            geometry: Any = module.stride, padding, module.kernel_size, dims, module.dilation
            output_padding = module._output_padding(x, sizes, *geometry)
        else:
            without_data, padding = padded(module, torch.empty_like(x, device="meta"), w)
            shape = without_data.shape
    except (RuntimeError, ValueError):
        return None
    if is_traceable_wrapper_subclass(x) or is_traceable_wrapper_subclass(w):
        return None
    dtype, steps = _dtype(x), (module.stride, padding, module.dilation, module.groups)
    transposition: Any = {
        "is_transposed": isinstance(module, _ConvTransposeNd),
        "output_padding": output_padding,
    }
    memory_format = _memory_format(x, w, shape, steps, dtype, **transposition)
    return problem_of_call(x, w, *steps, **transposition, x_shape=shape, dtype=dtype, memory_format=memory_format)


def _memory_format(
    x: Tensor, w: Tensor, shape: Sequence[int], geometry: Sequence[Any], dtype: torch.dtype, **transposition: Any
) -> MemoryFormat:
    """Return the memory format that torch would use for x and w; where shapes allow both formats, the strides decide.

    On a GPU, float64 is never channels_last. Of volumes, only some of torch's backends on the CPU compute in
    channels_last, and the sizes decide which one it picks.

    shape: of x once it is padded.
    """
    exact_on_cuda = x.device.type == "cuda" and x.dtype == torch.float64
    if x.dim() == 3 or exact_on_cuda or not any(map(suggests_channels_last, (x, w))):
        return MemoryFormat.CONTIGUOUS
    if x.dim() == 5 and x.device.type == "cpu":
        volumes, filters = (
            torch.empty(tuple(sizes), dtype=dtype, memory_format=torch.channels_last_3d) for sizes in (shape, w.shape)
        )
        with suppress(RuntimeError):  # an invalid call, which torch reports
            return torchs_memory_format(volumes, filters, geometry, **transposition)
    return MemoryFormat.CHANNELS_LAST


def _dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which torch computes the convolution of x: its own or, unless float64, that of autocast."""
    kind = x.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if autocast else x.dtype
