"""The three convolutions as torch operators: ``mucudnn::conv2d``, ``conv2d_backward_data``, ``conv2d_backward_filter``.

The configuration to run is looked up by the integer ``tuning``, the handle of a ``Choices``. If there is none (other
shape, larger batch, other dtype, unknown handle, handle 0), the operators compute torch's own convolution.
"""

from __future__ import annotations

from math import inf
from typing import Any

from torch import Tensor

from mucudnn.core.errors import InvalidInputError, MisalignedError, UnavailableError, say_once
from mucudnn.core.problem import Operation
from mucudnn.kernels.memory import is_out_of_memory
from mucudnn.kernels.torch_convolution import Geometry, torch_convolution
from mucudnn.running.choices import Choices, Measured, choices_of, executable_of, forget, note_failure
from mucudnn.running.definition import define_convolution
from mucudnn.running.devices import made_current
from mucudnn.running.dispatcher import untouched
from mucudnn.running.eager.hot_path import run_known
from mucudnn.running.executable import Executable, StepError
from mucudnn.running.workspace import make_room, note_lack_of_memory

_INSTEAD = "torch's own convolution runs instead"


def computed(
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    geometry: Geometry,
    choices: Choices | Measured,
) -> Tensor | None:
    """Return the result of a call's tuned configuration; None if the call is not tuned or the configuration cannot run.

    x: (N, C, H, W), w: (K, C // groups, R, S). third: the bias, (K,) or None, in FORWARD; else dy, (N, K, P, Q). Only
    shape and strides are used of the operand in the result's place. Autograd does not record this function: call it
    with gradients disabled, or below autograd. A step may be torch's own convolution of a micro-batch.

    If a step fails, torch's own convolution computes this and all further calls; failures are recorded.
    """
    executable = None
    while True:
        try:
            result: Tensor | None = run_known(choices.executables, operation, x, w, third, *geometry)
            if result is not NotImplemented:
                return result
            executable = executable_of(choices, operation, x, w, third, geometry)
            return None if executable is None else _run(executable, x, w, third)
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


def values(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
    """Return the result of a call by its tuned configuration (``computed``), or by torch's own as the fallback.

    rest: stride, padding, dilation, groups, and ``Choices``, ``Measured`` or None. For ``Measured`` any error is
    raised.
    """
    geometry, choices = rest[:4], rest[4]
    if isinstance(choices, Measured):
        return as_measured(operation, x, w, third, geometry, choices)
    if choices is not None:
        result = computed(operation, x, w, third, geometry, choices)
        if result is not None:
            return result
        if choices.beside_torchs:
            make_room(choices.beside_torchs.get(operation, inf))
    return torch_convolution(operation, x, w, third, geometry)


def as_measured(
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    geometry: Geometry,
    measured: Measured,
) -> Tensor:
    """Return the result of a call by the executable that is being measured, without a fallback: raise any error."""
    result = run_known(measured.executables, operation, x, w, third, *geometry)
    if isinstance(result, Tensor):
        return result
    executable = executable_of(measured, operation, x, w, third, geometry)
    if executable is None:
        raise InvalidInputError(f"what is measured does not fit {operation}, x {tuple(x.shape)}, w {tuple(w.shape)}")
    return _run(executable, x, w, third)


def _run(executable: Executable, x: Tensor, w: Tensor, third: Tensor | None) -> Tensor:
    if executable.bound is not None:
        return executable.bound(x, w, third)
    with untouched, made_current(x.device):  # a step may be torch's own convolution
        return executable.run(x, w, third)


def _by_handle(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, *rest: Any) -> Tensor:
    *geometry, tuning = rest
    return values(operation, x, w, third, (*geometry, choices_of(tuning)))


OPERATORS = define_convolution(_by_handle)
conv2d, conv2d_backward_data, conv2d_backward_filter = OPERATORS.values()
