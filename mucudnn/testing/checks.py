"""Checks of the contract of algorithms, one function for each promise: see ``mucudnn.kernels.algorithm``.

Operands are random numbers of torch's global generator, so that seeding it reproduces a check. Each check raises
``AssertionError`` with the actual and the allowed value if the promise is broken.

Calls of an algorithm on buffers of exactly the declared size between guard zones, which detect writes outside.

The bytes allocated in a call are counted. Under AddressSanitizer (``make sanitize``) the zones are poisoned, so that
reads of them are reported, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import cache, partial
from itertools import accumulate, cycle
from math import inf, nan, prod

import torch
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.algorithm import Algorithm, Epilogue, Prologue, Workspace, zero_moments
from mucudnn.kernels.memory import ALIGNMENT_BYTES, dense_strides, peak_allocated_bytes, torch_dtype
from mucudnn.kernels.torch_convolution import reference, relative_l2_error, torch_convolution
from mucudnn.measuring.guard_zones import GuardedBuffer
from mucudnn.measuring.operands import Operands

# One call between guard zones

_GUARD_BYTES = 2 * ALIGNMENT_BYTES  # small, since thousands of buffers are checked


@cache
def sanitizer() -> ctypes.CDLL | None:
    """Return AddressSanitizer's runtime library; None if the process does not run under AddressSanitizer."""
    process = ctypes.CDLL(None)
    return process if hasattr(process, "__asan_poison_memory_region") else None


@dataclass
class GuardedMemory:
    """Aligned buffers filled with NaN, which detect writes around them."""

    device: str = "cpu"
    guard_bytes: int = _GUARD_BYTES
    buffers: list[tuple[GuardedBuffer, int]] = field(default_factory=list)  # each with its size in bytes

    def buffer(self, size_bytes: int) -> Tensor:
        """Return a new buffer between guard zones: 1-D, uint8."""
        guarded = GuardedBuffer(self.device, self.guard_bytes)
        guarded.require(size_bytes)
        guarded.arm(size_bytes)
        self.buffers.append((guarded, size_bytes))
        self._tell_sanitizer("poison")
        return guarded.part(size_bytes)

    def tensor(self, problem: ConvProblem, shape: Sequence[int]) -> Tensor:
        """Return a new tensor of shape (N, C, ...) between guard zones, in the problem's dtype and memory format."""
        return self.vector(problem, prod(shape)).as_strided(shape, dense_strides(shape, problem.memory_format))

    def vector(self, problem: ConvProblem, count: int) -> Tensor:
        """Return a new 1-D tensor of ``count`` elements between guard zones, in the problem's dtype."""
        return self.buffer(count * problem.item_bytes).view(torch_dtype(problem))

    def trespass(self) -> str | None:
        """Return a description of a write in a guard zone around a buffer; None if there was none."""
        self._tell_sanitizer("unpoison")
        places = [place for buffer, size in self.buffers if (place := buffer.trespass(size)) is not None]
        self._tell_sanitizer("poison")
        return places[0] if places else None

    def _tell_sanitizer(self, action: str) -> None:
        runtime = sanitizer() if self.device == "cpu" else None
        if runtime is None:
            return
        for zone in (zone for buffer, size in self.buffers for zone in buffer.zones(size)):
            runtime[f"__asan_{action}_memory_region"](ctypes.c_void_p(zone.data_ptr()), ctypes.c_size_t(zone.nbytes))


@dataclass
class Call:
    """One call of one operation of an algorithm, on random numbers of torch's global generator.

    written: the tensor that the call writes, initially filled with NaN, or with zeros if the algorithm adds to it.
    read: the other two tensors.
    undeclared_bytes: after ``run``, the largest excess of the bytes that an open, step or close allocated over the
    declared ones; may be negative.
    """

    problem: ConvProblem
    batch_size: int
    memory: GuardedMemory = field(default_factory=GuardedMemory)
    undeclared_bytes: int = -(2**63)

    def __post_init__(self) -> None:
        self.x = self.memory.tensor(self.problem, self.problem.x_shape(self.batch_size))
        self.w = self.memory.tensor(self.problem, self.problem.w_shape())
        self.y = self.memory.tensor(self.problem, self.problem.y_shape(self.batch_size))
        self.written = Operands(self.x, self.w, self.y).written(self.problem.operation)
        self.read = [tensor for tensor in (self.x, self.w, self.y) if tensor is not self.written]
        for tensor in self.read:
            tensor.normal_()
        if self.problem.operation is Operation.BACKWARD_FILTER:
            self.w.zero_()

    @torch.no_grad()
    def run(
        self,
        algorithm: Algorithm,
        micro_batches: Sequence[int],
        bias: Tensor | None = None,
        epilogue: Epilogue | None = None,
        prologue: Prologue | None = None,
    ) -> Tensor:
        """Open the algorithm, step over micro-batches of these sizes, close it; return the output.

        epilogue: runs them in one stage, of an algorithm that ``fuses``, and is computed on y.
        prologue: does the same, of an algorithm that ``fuses_normalization``, and is computed on x.

        Raises ``AssertionError`` if an input was changed, or a byte written outside the output and the workspace.
        """
        before = [tensor.clone() for tensor in self.read]
        workspaces = {n: algorithm.workspace(self.problem, n) for n in micro_batches}
        slices = [slice(end - n, end) for end, n in zip(accumulate(micro_batches), micro_batches, strict=True)]
        most = (max(sizes) for sizes in zip(*map(astuple, workspaces.values()), strict=True))
        workspace, stage = Workspace(*most), None
        if prologue is not None:
            normalizing = algorithm.normalizing(self.problem, self.batch_size, slices)
            assert normalizing is not None
            stage, workspace = normalizing
        elif epilogue is not None:
            stage = algorithm.bound(self.problem, self.batch_size, slices, workspace)
            assert stage is not None
        prepared = self.memory.buffer(workspace.prepared_bytes)
        if stage is not None:
            scratch = self.memory.buffer(workspace.scratch_bytes)
            x, w, y, prepared_at, scratch_at = (
                tensor.data_ptr() for tensor in (self.x, self.w, self.y, prepared, scratch)
            )
            stage(x, w, y, None if bias is None else bias.data_ptr(), prepared_at, scratch_at, epilogue, prologue)
        else:
            internal = {n: algorithm.internal_bytes(self.problem, n) for n in micro_batches}
            calls = [(max(internal.values()), partial(algorithm.open, self.problem, self.w, prepared))]
            for n, part in zip(micro_batches, slices, strict=True):
                tensors = self.x[part], self.w, self.y[part], bias, prepared
                scratch = self.memory.buffer(workspaces[n].scratch_bytes)
                calls.append((internal[n], partial(algorithm.step, self.problem, *tensors, scratch)))
            calls.append((max(internal.values()), partial(algorithm.close, self.problem, self.w, prepared)))
            for declared_bytes, call in calls:
                excess_bytes = peak_allocated_bytes(call, self.x.device.type) - declared_bytes
                self.undeclared_bytes = max(self.undeclared_bytes, excess_bytes)
        if (place := self.memory.trespass()) is not None:
            raise AssertionError(f"written outside the output, prepared or scratch: {place}")
        for tensor, copy in zip(self.read, before, strict=True):
            as_bytes = (operand.flatten().view(torch.uint8) for operand in (tensor, copy))
            if not torch.equal(*as_bytes):  # bytes, since NaN does not equal itself
                raise AssertionError("an input was changed")
        return self.written


# Checks

SAMPLES = 5  # one for each of the ``places``
READ = {Operation.FORWARD: "xw", Operation.BACKWARD_DATA: "wy", Operation.BACKWARD_FILTER: "xy"}
IMAGE = {Operation.FORWARD: "x", Operation.BACKWARD_DATA: "y", Operation.BACKWARD_FILTER: "x"}
VALUES = (nan, inf, -inf)


def places(shape: Sequence[int]) -> Tensor:
    """Return a mask of one element in each of the first samples (or filters): the corners and the middle.

    Each element is in another channel, so that samples (in a filter's gradient, channels) show how far a NaN written to
    the element spreads.
    """
    n, c, *pixels, height, width = shape
    spots = [(height // 2, width // 2), (0, 0), (height - 1, width - 1), (0, width - 1), (height - 1, 0)]
    where = torch.zeros(tuple(shape), dtype=torch.bool)
    for index, spot in zip(range(n), spots, strict=False):
        where[index, index % c, *(size // 2 for size in pixels), *spot] = True
    return where


def spoil(tensor: Tensor) -> None:
    """Write NaN, Inf and -Inf alternately to the elements of the tensor that ``places`` marks."""
    values = cycle(VALUES)
    for index in places(tensor.shape).nonzero():
        tensor[tuple(index)] = next(values)


def dependent(problem: ConvProblem, operand: str, batch_size: int = SAMPLES, *, on_padding: bool = False) -> Tensor:
    """Return a mask of the results that depend on one of the operand's NaN or Inf, which are at the ``places``.

    on_padding: also mark results of products with the zeros of the padding.
    """
    if on_padding:
        padded = tuple(size + 2 * border for size, border in zip(problem.extent, problem.padding, strict=True))
        problem = replace(problem.with_extent(padded), padding=(0,) * len(padded))
    shapes = {"x": problem.x_shape(batch_size), "w": problem.w_shape(), "y": problem.y_shape(batch_size)}
    ones = {name: torch.ones(shape) for name, shape in shapes.items()}
    ones[operand] = places(shapes[operand]).float()
    return reference(problem, **ones) != 0


def kinds(results: Tensor) -> Tensor:
    """Return 0 for finite results, 1 for Inf, -1 for -Inf, and 2 for NaN."""
    return results.isposinf().int() - results.isneginf().int() + 2 * results.isnan().int()


def split(algorithm: Algorithm, problem: ConvProblem, batch_size: int, micro_batch_size: int) -> list[int]:
    """Return the sizes of micro-batches of this size, and a remainder, that make up a mini-batch.

    The mini-batch stays undivided if the algorithm does not support such slices.
    """
    remainder = batch_size % micro_batch_size
    sizes = [micro_batch_size] * (batch_size // micro_batch_size) + [remainder] * bool(remainder)
    return sizes if all(algorithm.supports_micro_batch(problem, n) is None for n in sizes) else [batch_size]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run the block with ``count`` torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# One problem

_MOMENT_BOUND = 1e-6  # largest error of a mean, relative to mean and deviation, and relative one of a variance


def check_result(
    algorithm: Algorithm, problem: ConvProblem, micro_batches: Sequence[int], bound: float, *, has_bias: bool = False
) -> None:
    """Require that the algorithm's result is correct, computed in the declared bytes of memory between guard zones.

    bound: largest relative L2 error against float64.
    has_bias: whether to add a bias, in FORWARD.
    """
    call = Call(problem, sum(micro_batches))
    bias = call.memory.vector(problem, problem.k).normal_() if has_bias else None
    expected = reference(problem, call.x, call.w, call.y, bias)
    _require_close("the result", call.run(algorithm, micro_batches, bias), expected, bound)
    if call.undeclared_bytes > 0:
        raise AssertionError(
            f"one open, step or close allocated {call.undeclared_bytes} bytes more than internal_bytes declares"
        )


def check_epilogue(
    algorithm: Algorithm,
    problem: ConvProblem,
    micro_batches: Sequence[int],
    bound: float,
    activation: str | None,
    *,
    adds: bool = True,
) -> None:
    """Require activation(convolution + bias + added) from one fused call, with NaN and Inf where torch has them."""
    call = Call(problem, sum(micro_batches))
    bias = call.memory.vector(problem, problem.k).normal_()
    added = call.memory.tensor(problem, problem.y_shape(call.batch_size)).normal_(std=8) if adds else None
    if added is not None:
        spoil(added)
    sums = reference(problem, call.x, call.w, call.y, bias)
    expected = Epilogue(activation, None if added is None else added.double()).apply(sums)
    actual = call.run(algorithm, micro_batches, bias, Epilogue(activation, added))
    what = f"with {'an addition and ' * adds}{activation or 'no activation'}, the result"
    if not torch.equal(kinds(actual), kinds(expected)):
        raise AssertionError(f"{what} is not NaN or infinite where torch's is")
    finite = expected.isfinite()
    _require_close(what, actual[finite], expected[finite], bound)


def check_moments(
    algorithm: Algorithm, problem: ConvProblem, micro_batches: Sequence[int], *, offset: float = 0
) -> None:
    """Require counts, means and squared deviations of y as it is stored, in the same bits in every run, with y's bits.

    offset: added to the bias, so that means are far from zero.
    """
    call = Call(problem, sum(micro_batches))
    bias = call.memory.vector(problem, problem.k).normal_() + offset
    alone = call.run(algorithm, micro_batches, bias, Epilogue()).clone()
    runs = []
    for _ in range(2):
        call.y.fill_(nan)
        room = zero_moments(problem.k)
        moments = call.memory.buffer(room.nbytes).view(torch.float64).view(room.shape).zero_()
        y = call.run(algorithm, micro_batches, bias, Epilogue(moments=moments))
        if not torch.equal(y, alone):
            raise AssertionError("y has other bits if its moments are computed, too")
        runs.append(moments[0, :3, : problem.k].clone())
    if not torch.equal(*runs):
        raise AssertionError("the moments of a second run have other bits")
    values = alone.double().transpose(0, 1).flatten(1)
    counts, means, squares = runs[0]
    if not (counts == values.shape[1]).all():
        raise AssertionError(f"{counts.tolist()} values are counted; a channel of y has {values.shape[1]}")
    expected, variance = values.mean(1), values.var(1, correction=0)
    errors = (means - expected).abs() / (variance.sqrt() + expected.abs()), (squares / counts / variance - 1).abs()
    if not max(error.nan_to_num().max() for error in errors) <= _MOMENT_BOUND:
        raise AssertionError(f"means and variances have relative errors of {[float(e.max()) for e in errors]}")


def random_prologue(channels: int, function: str | None, dtype: torch.dtype = torch.float32) -> Prologue:
    """Return the prologue of a batch norm with random statistics and parameters, of this dtype, and an activation."""
    weight, bias = (torch.randn(channels).to(dtype) for _ in range(2))
    return Prologue(torch.randn(channels), torch.rand(channels) + 0.5, weight, bias, function, slope=0.2)


def normalized(x: Tensor, prologue: Prologue) -> Tensor:
    """Return what a prologue makes of x, (N, C, ...), in float64."""
    operands = prologue.mean, prologue.inverse**-2, prologue.weight, prologue.bias
    mean, variance, weight, bias = (None if each is None else each.double() for each in operands)
    z = F.batch_norm(x.double(), mean, variance, weight, bias, eps=0)
    functions: dict[str | None, Callable[[Tensor], Tensor]] = {
        **{None: lambda z: z, "ReLU": F.relu, "ReLU6": F.relu6, "SiLU": F.silu, "hardswish": F.hardswish},
        **{"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")},
        "leaky_relu": partial(F.leaky_relu, negative_slope=prologue.slope),
    }
    return functions[prologue.function](z)


def check_normalization(
    algorithm: Algorithm, problem: ConvProblem, micro_batches: Sequence[int], bound: float, function: str | None
) -> None:
    """Require the convolution of a normalized and activated x from one call on x, in the same bits in every run."""
    call = Call(problem, sum(micro_batches))
    prologue = random_prologue(problem.c, function, torch_dtype(problem))
    expected = reference(problem, normalized(call.x, prologue), call.w, call.y)
    actual = call.run(algorithm, micro_batches, prologue=prologue).clone()
    _require_close(f"of x normalized, with {function}, the result", actual, expected, bound)
    if problem.operation is Operation.BACKWARD_FILTER:
        call.w.zero_()
    again = call.run(algorithm, micro_batches, prologue=prologue)
    if algorithm.deterministic and not torch.equal(actual, again):
        raise AssertionError("the result of a second run on x normalized has other bits")


def check_splits(algorithm: Algorithm, problem: ConvProblem, batch_size: int, bound: float) -> None:
    """Require that the divided and the undivided mini-batch give the same result."""
    call = Call(problem, batch_size)
    undivided = call.run(algorithm, [batch_size]).clone()
    for n in range(1, batch_size):
        call.written.zero_()
        divided = call.run(algorithm, split(algorithm, problem, batch_size, n))
        _require_close(f"in micro-batches of {n}, the result against the undivided one", divided, undivided, bound)


def check_determinism(algorithm: Algorithm, problem: ConvProblem, micro_batches: Sequence[int]) -> None:
    """Require that every run of the algorithm gives bitwise identical results."""
    call = Call(problem, sum(micro_batches))
    first = call.run(algorithm, micro_batches).clone()
    for run in range(2, 5):
        call.written.zero_()
        if not torch.equal(call.run(algorithm, micro_batches), first):
            raise AssertionError(f"run {run} gives other bits than the first, and deterministic is True")


def check_added(algorithm: Algorithm, problem: ConvProblem, micro_batches: Sequence[int], bound: float) -> None:
    """Require that BACKWARD_FILTER adds its gradient to the values that dw has, instead of replacing them.

    One mini-batch may be divided among several algorithms, which run one after the other.
    """
    call = Call(problem, sum(micro_batches))
    expected = reference(problem, call.x, call.w, call.y) + 3.0
    call.w.fill_(3.0)
    _require_close("dw, added to 3 in every element,", call.run(algorithm, micro_batches), expected, bound)


def check_float32_sums(algorithm: Algorithm, problem: ConvProblem) -> None:
    """Require that BACKWARD_FILTER sums micro-batches of half precision in at least float32.

    The call has 128 equal slices: below float32 the sum would stop growing, or lose its last bits at every addition.
    """
    call, sample = Call(problem, 128), Call(problem, 1)
    call.x.copy_(call.x[:1].expand_as(call.x))
    call.y.copy_(call.y[:1].expand_as(call.y) / 16)
    sample.x.copy_(call.x[:1])
    sample.y.copy_(call.y[:1])
    expected = 128 * sample.run(algorithm, [1]).double()
    bound = 2 * torch.finfo(torch_dtype(problem)).eps
    _require_close("the sum of 128 equal slices", call.run(algorithm, [1] * 128), expected, bound)


def check_workspace(algorithm: Algorithm, problem: ConvProblem, micro_batch_size: int) -> None:
    """Require that ``workspace`` returns nonnegative bytes without allocating anything."""
    told = algorithm.workspace(problem, micro_batch_size)
    if not isinstance(told, Workspace) or min(told.prepared_bytes, told.scratch_bytes) < 0:
        raise AssertionError(f"workspace() is {told!r}; it must be a Workspace of bytes that are no less than 0")
    allocated = peak_allocated_bytes(partial(algorithm.workspace, problem, micro_batch_size))
    if allocated:
        raise AssertionError(f"workspace() allocated {allocated} bytes; it must allocate nothing")


# NaN and Inf


def check_nothing_is_hidden(algorithm: Algorithm, problem: ConvProblem) -> None:
    """Require that NaN and Inf propagate to every result that depends on them, as loss scaling needs."""
    for operand in READ[problem.operation]:
        hidden = dependent(problem, operand) & spoilt_result(algorithm, problem, operand).isfinite()
        if hidden.any():
            raise AssertionError(
                f"{int(hidden.sum())} results are finite that depend on a NaN or an infinity in {operand}; none may be"
            )


def check_locality(algorithm: Algorithm, problem: ConvProblem, operand: str) -> None:
    """Require that NaN and Inf in an operand spread no further than the definition and torch's own convolution say.

    In the image (x, or dy in BACKWARD_DATA) they spread to the same results as in torch's. In dy of BACKWARD_FILTER
    they may also be multiplied by the zeros of the padding, as in some of torch's own backends: 0 * NaN is NaN.
    """
    actual, in_image = spoilt_result(algorithm, problem, operand), operand == IMAGE[problem.operation]
    allowed = dependent(problem, operand, on_padding=not in_image)
    if in_image:
        expected = torchs_spoilt_result(problem, operand)
        allowed |= ~expected.isfinite()  # in half precision, torch spreads NaN too far if channels are odd
        different = int((kinds(actual) != kinds(expected)).sum())
        if problem.dtype == "float32" and different:
            raise AssertionError(
                f"{different} results are NaN, infinite or finite unlike torch's own where {operand} has a NaN or an "
                "infinity, and is_local is True"
            )
    spoilt = ~actual.isfinite() & ~allowed
    if spoilt.any():
        raise AssertionError(
            f"{int(spoilt.sum())} results are not finite that do not depend on the NaN or infinity in {operand}, and "
            "is_local is True"
        )


def spoilt_call(problem: ConvProblem, operand: str) -> Call:
    """Return a call with NaN and Inf in ``operand``, its values the same for every algorithm."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        call = Call(problem, SAMPLES)
    spoil(getattr(call, operand))
    return call


def spoilt_result(algorithm: Algorithm, problem: ConvProblem, operand: str) -> Tensor:
    """Return the algorithm's result for a ``spoilt_call``, in micro-batches of 2, 2 and 1 samples if supported."""
    return spoilt_call(problem, operand).run(algorithm, split(algorithm, problem, SAMPLES, 2))


@cache
def torchs_spoilt_result(problem: ConvProblem, operand: str) -> Tensor:
    """Return the result of torch's convolution if ``operand`` has NaN and Inf, as in ``spoilt_call``."""
    call = spoilt_call(problem, operand)
    geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
    third = None if problem.operation is Operation.FORWARD else call.y
    return torch_convolution(problem.operation, call.x, call.w, third, geometry)


def _require_close(what: str, actual: Tensor, expected: Tensor, bound: float) -> None:
    error = relative_l2_error(actual, expected)
    if not error <= bound:
        raise AssertionError(f"{what} has a relative L2 error of {error:.2e}; allowed is at most {bound:.0e}")
