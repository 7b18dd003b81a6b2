"""The hot path of a call: in C++ (``_call.cpp``) where that was built, else in Python, for more microseconds.

Both give the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mucudnn.kernels.contract.algorithm import BoundStage
from mucudnn.running.eager import plain
from mucudnn.running.workspace import kept_by_each_thread
from mucudnn.words.problem import Operation

_KEPT = -1  # where what a stage has prepared lies, if that is not the workspace; _call.cpp has the same
_OPERATIONS = (Operation.FORWARD, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER)  # in the order of _call.cpp

# Methods that are true of tensors whose bytes do not tell all: a negation is pending, or dimensions have names, as they
# can in older versions of torch.
UNUSUAL = tuple(name for name in ("is_neg", "has_names") if hasattr(Tensor, name))


def set_up(unusual: tuple[str, ...] = UNUSUAL) -> None:
    """Hand over what torch has. Raises ``AttributeError`` and ``ValueError`` where it has no such DLPack."""
    _call.set_up(
        *(Tensor, torch.nn.Parameter, Tensor.__dlpack_c_exchange_api__),
        *(torch.get_num_threads, torch.empty_strided, torch.empty_like),
        *(plain.WATCHING, plain.tracing_state, vars(forward_ad), kept_by_each_thread),
        *(torch.is_grad_enabled, _OPERATIONS, unusual),
    )


try:
    from mucudnn.running.eager import _call

    set_up()
except (ImportError, AttributeError, ValueError):  # it was not built, or torch does not describe its tensors to it
    is_built = False
else:
    is_built = True

Bound = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _run_nothing(executables: dict[Any, Any], *call: Any) -> Any:
    return NotImplemented


def _no_key(*call: Any) -> None:
    return None


def is_eager_in_python(x: Tensor, w: Tensor, third: Tensor | None) -> bool:
    """Tell what ``is_eager`` does."""
    if not plain.nobody_watches():
        return False
    return plain.is_plain(x) and plain.is_plain(w) and (third is None or plain.is_plain(third))


# Runs a call whose executable is among these, and bound. Takes executables, and what ``operators.computed`` takes,
# without choices. Returns None where torch's own runs it, NotImplemented where neither is known. Raises what torch
# raises for lack of memory.
run_known: Callable[..., Any] = _call.run_known if is_built else _run_nothing

# Makes the key by which ``run_known`` finds the executable of a call. Takes the same without executables. ``None``:
# it runs no such call.
known_key: Callable[..., bytes | None] = _call.key if is_built else _no_key

# Tells whether nobody watches, and x, w and the bias (or None) or dy are plain (``plain``). Not while torch compiles.
is_eager: Callable[[Tensor, Tensor, Tensor | None], bool] = _call.is_eager if is_built else is_eager_in_python

# Runs a fused convolution in inference, if its executable is known and bound. Takes the ``Conv2d``, x, what is added to
# y (or None), and the number of the activation in the libraries. Not while torch compiles, nor while modules have
# global hooks. Returns NotImplemented where ``Conv2d.fused`` has to run it.
fused: Callable[..., Any] = _call.fused if is_built else _run_nothing


def compiled_functions(values_in_python: Callable[..., Tensor]) -> Any:
    """Return the module with ``values`` and ``gradients``, to which this function is what the first does in all cases.

    ``None`` where it was not built.
    """
    if not is_built:
        return None
    _call.set_values_in_python(values_in_python)
    return _call


def bound_in_cpp(
    operation: Operation,
    stages: Sequence[tuple[BoundStage, int | None]],
    scratch: slice,
    is_channels_last: bool,
    fuses: bool,
    result: tuple[object, ...],
    new_large: Callable[[], Tensor] | None,
    otherwise: Bound,
) -> Bound:
    """Bind an executable to C++, where that can be done; else return ``otherwise``, which does the same in Python.

    stages, fuses: as for ``bound_executable``. result: shape, strides, dtype and device of what the operation writes.
    new_large: makes it where it is large; else ``None``. Where operands are not dense, this thread has no workspace
    yet, or a stage needs what another call has prepared, ``otherwise`` is called.
    """
    if not is_built or any(stage.entry is None for stage, _ in stages):
        return otherwise
    entries = tuple(
        (*stage.entry, _KEPT if prepared is None else prepared) for stage, prepared in stages if stage.entry is not None
    )
    number = _OPERATIONS.index(operation)
    names = ("dtype", "device")
    workspace = scratch.start, scratch.stop
    bound: Bound = _call.Bound(
        *(number, entries, *workspace, is_channels_last, fuses),
        *(result, names, new_large, otherwise),
    )
    return bound
