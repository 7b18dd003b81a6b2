"""Tracing of the memory of a training step, operator by operator, by running it on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mucudnn.core.errors import InvalidInputError, tolerated
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.memory import block_bytes, torch_format
from mucudnn.running.modules import TunedModule, running_torchs_own
from mucudnn.running.problems import problem_operation
from mucudnn.tuning.model_state import free_of_fakes, is_training, leaf, undisturbed
from mucudnn.tuning.trace import Call, call_of, observed

_FORWARD, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


@dataclass(frozen=True, slots=True)
class ConvolutionCall:
    """One operation (y, dx or dw) of one call of a convolution module; ``problem`` describes the operation.

    in_use_bytes: bytes in use while the operation runs, without any workspace, including its result and copies of
    operands that are not in the problem's memory format.
    """

    name: str
    problem: ConvProblem
    batch_size: int
    in_use_bytes: int

    @property
    def operation(self) -> Operation:
        return self.problem.operation


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The memory of a training step.

    base_bytes: parameters, buffers and input, included in every number.

    peak_bytes: most bytes in use, without workspaces and memory allocated inside an operator.
    """

    base_bytes: int
    peak_bytes: int
    calls: tuple[ConvolutionCall, ...]


def trace_step(model: nn.Module, sample_input: Any) -> TracedStep:
    """Trace the memory of one training step of the model with torch's own convolutions.

    The step is a forward pass, the sum of all floating-point outputs as the loss, and a backward pass into gradients
    that start as None. The model's gradients, buffers, mode and the random state are restored afterwards.

    sample_input: the only argument, or a tuple of all positional ones.

    The step runs on fake tensors and a copy of the model without memory. If that fails (control flow on tensor values,
    an operator without a fake kernel, a model that cannot be copied), the model itself runs on real tensors. The output
    is kept until the step ends, as in a training loop that holds it in a variable. Only memory on the model's type of
    device is counted; on CUDA, in the allocator's blocks of 512 bytes.

    Raises ``InvalidInputError`` if the output has no floating tensor, and any error of the model.
    """
    arguments = sample_input if isinstance(sample_input, tuple) else (sample_input,)
    tuned = [module for module in model.modules() if isinstance(module, TunedModule)]
    with undisturbed(model), running_torchs_own(tuned):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with tolerated(Exception), free_of_fakes(model):
            with FakeCopyMode(fake):
                without_memory = copy.deepcopy(model)
            inputs = tree_map(lambda value: fake.from_tensor(value) if isinstance(value, Tensor) else value, arguments)
            with fake:
                return _trace(without_memory, inputs)
        return _trace(model, arguments)


def _trace(model: nn.Module, arguments: tuple[Any, ...]) -> TracedStep:
    inputs = tree_map(leaf, arguments)
    base = _tensors((*model.parameters(), *model.buffers(), inputs))
    tracer = _Tracer(base, base[0].device.type if base else "cpu")
    base_bytes = tracer.live_bytes
    with observed(model, tracer.run), tracer:
        training_step(model, inputs)
    return TracedStep(base_bytes, tracer.peak_bytes, tuple(tracer.calls))


def training_step(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Run ``model(*arguments)``, with the sum of floating-point outputs as the loss, and a backward pass if possible.

    A model in training mode keeps the modes of its parts, which may be frozen; any other is switched to training mode.
    Raises ``InvalidInputError`` if the output has no floating tensor, and any error of the model.
    """
    if not is_training(model):
        model.train()
    output = model(*arguments)
    floating = [tensor for tensor in _tensors(output) if tensor.is_floating_point()]
    if not floating:
        raise InvalidInputError(
            f"the model returned {type(output).__name__} without a floating-point tensor, so there is no loss to "
            "train with; return a tensor, or a tuple, list or dict with one"
        )
    loss = sum((tensor.sum() for tensor in floating[1:]), floating[0].sum())
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Forward:
    """A convolution of the forward pass, recorded to find its module in the backward pass.

    call: the module's call; None if no traced module was running.
    filter: storage and offset of w.
    done: operations of the backward pass already matched with this convolution.
    """

    call: Call | None
    filter: tuple[int, int]
    shapes: tuple[torch.Size, torch.Size]
    done: set[Operation] = field(default_factory=set)


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of tensor storages, from the operator that makes them until they are freed.

    Views are free. A storage that is first seen as an operand existed before the step, and counts only in ``base``.
    """

    def __init__(self, base: Sequence[Tensor], device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        storages = [tensor.untyped_storage() for tensor in base if tensor.device.type == device_type]
        sizes = {storage._cdata: self._block_bytes(storage.nbytes()) for storage in storages}
        self.live_bytes = self.peak_bytes = sum(sizes.values())
        self.calls: list[ConvolutionCall] = []
        self.known: dict[int, ReferenceType[Any]] = {}
        self.made: dict[int, int] = {}  # bytes of the storages made in the step
        self.running: list[Call | None] = []
        self.forwards: list[_Forward] = []

    def run(self, name: str, module: nn.Module, compute: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.running.append(call_of(name, module, arguments, named))
        try:
            return compute(*arguments, **named)
        finally:
            self.running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for operand in _tensors((args, kwargs)):
            self._meet(operand.untyped_storage())
        before_bytes, first = self.live_bytes, len(self.calls)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.device.type == self.device_type:
                self._count(tensor.untyped_storage())
        if func is _FORWARD:
            self._forward(args[0], args[1], result, transposed=args[6])
        elif func is _BACKWARD:
            self._backward(args[0], args[1], args[2], result, before_bytes, transposed=args[7])
        self.peak_bytes = max(self.peak_bytes, self.live_bytes, *(call.in_use_bytes for call in self.calls[first:]))
        return result

    def _meet(self, storage: torch.UntypedStorage) -> bool:
        """Register a tensor's storage until it is freed; return whether it is new."""
        key = storage._cdata
        if key in self.known:
            return False
        self.known[key] = ref(storage, partial(self._died, key))
        return True

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if self._meet(storage):
            self.made[key] = 0
        if key in self.made:  # a known storage may have been resized
            size_bytes = self._block_bytes(storage.nbytes())
            self.live_bytes += size_bytes - self.made[key]
            self.made[key] = size_bytes

    def _died(self, key: int, _: ReferenceType[Any]) -> None:
        del self.known[key]
        self.live_bytes -= self.made.pop(key, 0)

    def _block_bytes(self, size_bytes: int) -> int:
        return block_bytes(size_bytes, self.device_type)

    def _forward(self, read: Tensor, w: Tensor, y: Tensor, *, transposed: bool) -> None:
        x = y if transposed else read
        operation = problem_operation(Operation.FORWARD, transposed=transposed)
        call = self.running[-1] if self.running else None
        if call is not None and not _is_of(call, operation, x, w):
            call = None  # another convolution in the forward of a subclass
        self.forwards.append(_Forward(call, _identity(w), (x.shape, w.shape)))
        self._record(operation, x, w, (read, w), self.live_bytes)

    def _backward(
        self, dy: Tensor, read: Tensor, w: Tensor, gradients: Sequence[Any], before_bytes: int, *, transposed: bool
    ) -> None:
        """Record dx, and dw while dx is allocated, as torch computes them."""
        x, in_use_bytes = dy if transposed else read, before_bytes
        computed = zip((Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER), gradients, (w, read), strict=False)
        for module_operation, gradient, second in computed:
            if gradient is not None:
                in_use_bytes += self._block_bytes(gradient.untyped_storage().nbytes())
                operation = problem_operation(module_operation, transposed=transposed)
                self._record(operation, x, w, (dy, second), in_use_bytes)

    def _record(
        self, operation: Operation, x: Tensor, w: Tensor, operands: tuple[Tensor, Tensor], in_use_bytes: int
    ) -> None:
        """Record one operation of a convolution.

        x, w: as in its problem.
        operands: the two tensors that it reads.

        It is of the latest forward convolution with this filter and these shapes that was not yet matched with the
        operation or, where hooks have replaced the saved filter, of the latest with these shapes.
        """
        alike = [f for f in reversed(self.forwards) if f.shapes == (x.shape, w.shape) and operation not in f.done]
        forward = next(chain((f for f in alike if f.filter == _identity(w)), alike), None)
        if forward is not None:
            forward.done.add(operation)
        if forward is None or forward.call is None:
            return
        problem, batch_size = forward.call.problem.with_operation(operation), forward.call.batch_size
        copied = (t for t in operands if not t.is_contiguous(memory_format=torch_format(problem)))
        copied_bytes = sum(self._block_bytes(t.nbytes) for t in copied)
        self.calls.append(ConvolutionCall(forward.call.name, problem, batch_size, in_use_bytes + copied_bytes))


def _is_of(call: Call, operation: Operation, x: Tensor, w: Tensor) -> bool:
    """Return whether x and w have the shapes of a call's problem; 1-D operands have no height."""
    problem = call.problem
    shapes = [(*t.shape[:2], 1, *t.shape[2:]) if t.dim() == 3 else tuple(t.shape) for t in (x, w)]
    return problem.operation is operation and shapes == [problem.x_shape(call.batch_size), problem.w_shape()]


def _identity(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in ``values`` that have a storage, which sparse and uninitialized ones do not have."""
    tensors = [v for v in tree_leaves(values) if isinstance(v, Tensor) and not is_lazy(v)]
    return [tensor for tensor in tensors if tensor.layout is torch.strided]
