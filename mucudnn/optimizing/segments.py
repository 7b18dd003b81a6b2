"""Which segments of a model run in micro-batches, where keeping less is not enough for a budget or takes longer.

A part of a model may be a segment if it is a module that is called once, with tensors of whole batches, or consecutive
children of a sequential one. What it would save and cost is estimated from the values of a step that has been traced
without segments; the step is traced again with those that are chosen. A micro-batch is several samples, or a band of
rows of one sample, which is computed with a halo.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from math import inf
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd
from torch.utils.hooks import RemovableHandle

from mucudnn.optimizing.bands import bands_of
from mucudnn.running.modules import TunedModule
from mucudnn.running.norms import TunedNorm
from mucudnn.running.segments import Segment, SegmentedModule, in_micro_batches
from mucudnn.running.tape import Tape
from mucudnn.solver import keeping as solver
from mucudnn.solver.keeping import Value

_MOST_PARTS = 6  # that are chosen
_COUNTS = (2, 4, 8, 16, 32)  # of micro-batches, or of bands
_LEAST_ROWS = 4  # of a band
_LEAST_GAIN = 0.05  # of bytes, and of the time that is computed again, for which one more part is worth while
_MOST_ERROR = 0.05  # of gradients in micro-batches, relative to their norm


@dataclass(frozen=True, slots=True)
class Part:
    """What may be a segment: a module or consecutive children of one, and what it computes in a forward pass.

    segment: with the whole batch as its micro-batch, until the part is chosen.
    start, end: of the values that are computed inside.
    batch_size, x_bytes, y_bytes: of its inputs and its result.
    rows: of its result, if inputs and result are images or volumes, in which case these may be frames; else 0.
    halo: the rows that a band reads beside its own, as a share of those there are; an estimate.
    bands: of each sample, if the part is to run in bands.
    """

    segment: Segment
    start: int
    end: int
    batch_size: int
    x_bytes: int
    y_bytes: int
    rows: int = 0
    halo: float = 0.0
    bands: int = 1

    @property
    def share(self) -> float:
        """The share of what is inside that is in memory at a time."""
        samples = self.segment.micro_batch / self.batch_size
        return samples if self.bands == 1 else samples * (1 / self.bands + self.halo)

    @property
    def repetition(self) -> float:
        """How often each row is computed in all bands together."""
        return 1 + (self.bands - 1) * self.halo

    def in_pieces(self) -> Iterator[Part]:
        """Yield the part in micro-batches, and in bands of at least a few rows of which most are their own."""
        for size in {max(1, self.batch_size // count) for count in _COUNTS} if self.batch_size > 1 else ():
            yield replace(self, segment=replace(self.segment, micro_batch=size))
        for bands in _COUNTS:
            if self.rows >= _LEAST_ROWS * bands and self.halo * bands <= 1:
                yield replace(self, segment=replace(self.segment, micro_batch=1), bands=bands)

    def is_apart(self, others: Sequence[Part]) -> bool:
        return all(self.end <= other.start or other.end <= self.start for other in others)

    def covers(self, other: Part) -> bool:
        return self.start <= other.start and other.end <= self.end


@contextmanager
def parts_of(model: nn.Module, tape: Tape) -> Iterator[list[Part]]:
    """Yield a list which has, after a forward pass that the tape records in the block, the parts of the model."""
    parts: list[Part] = []
    calls: dict[nn.Module, list[Part | None]] = {}
    begun: dict[nn.Module, int] = {}
    able = {module: name for name, module in model.named_modules() if _is_able(module)}
    norms = {module for module in able if isinstance(module, TunedNorm)}
    handles: list[RemovableHandle] = []

    def begin(module: nn.Module, arguments: Any) -> None:
        begun[module] = tape.count

    def end(module: nn.Module, arguments: Any, named: Any, result: Any) -> None:
        part, tensors = None, [*arguments, result]
        with torch._C.DisableTorchFunctionSubclass():  # pending tensors would be computed
            are_alike = all(isinstance(x, Tensor) and x.dim() > 1 and len(x) == len(tensors[0]) > 0 for x in tensors)
            if arguments and not named and are_alike:
                n, x_bytes = len(result), sum(x.nbytes for x in arguments)
                part = Part(Segment(able[module], None, None, n), begun[module], tape.count, n, x_bytes, result.nbytes)
                if all(x.dim() in (4, 5) and x.is_floating_point() for x in tensors):
                    part = replace(part, rows=result.shape[2], halo=_halo(module, min(x.shape[2] for x in arguments)))
        calls.setdefault(module, []).append(part)

    for module in able.keys() - norms:  # a norm with hooks would not be computed together with what follows
        handles += module.register_forward_pre_hook(begin), module.register_forward_hook(end, with_kwargs=True)
    try:
        yield parts
    finally:
        for handle in handles:
            handle.remove()
    once = {module: of_module[0] for module, of_module in calls.items() if len(of_module) == 1}
    for module, name in able.items():
        if isinstance(module, nn.Sequential) and _forward_of(module) is nn.Sequential.forward:
            places = [place for place, child in enumerate(module) if child not in norms]
            for first, last in combinations_with_replacement(places, 2):
                inside = [once.get(module[place]) for place in places if first <= place <= last]
                parts += _joined(Segment(name, first, last, 1), inside)
        else:
            part = once.get(module)
            if part is not None and (isinstance(module, SegmentedModule) or not isinstance(module, TunedModule)):
                parts.append(part)
    parts[:] = [part for part in parts if part.end - part.start > 1 and (part.batch_size > 1 or part.rows)]


def _halo(module: nn.Module, rows: int) -> float:
    """Return an estimate of the rows that a band reads beside its own, as a share of those there are.

    It is right for windows one after the other, and too large for those that are side by side.
    """
    read, ratio = 0, 1
    for inside in module.modules():
        if isinstance(inside, (_ConvNd, _MaxPoolNd, _AvgPoolNd)):
            size, stride, dilation = (
                one[0] if isinstance(one, (tuple, list)) else int(cast(int, one))
                for one in (inside.kernel_size, inside.stride, getattr(inside, "dilation", 1))
            )
            read += (size - 1) * dilation * ratio
            ratio *= 1 if getattr(inside, "transposed", False) else stride
    return read / rows


def _joined(segment: Segment, of_children: Sequence[Part | None]) -> list[Part]:
    """Return the part that consecutive children of a sequential module make up, if each of them is one."""
    inside = [part for part in of_children if part is not None]
    if len(inside) < len(of_children) or any(part.batch_size != inside[0].batch_size for part in inside):
        return []
    segment, last = replace(segment, micro_batch=inside[0].batch_size), inside[-1]
    rows, halo = min(part.rows for part in inside) and last.rows, sum(part.halo for part in inside)
    return [replace(inside[0], segment=segment, end=last.end, y_bytes=last.y_bytes, rows=rows, halo=halo)]


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    cls = module.untuned_class if isinstance(module, TunedModule) else type(module)
    return cast(Callable[..., Any], cast(Any, cls).forward)


def _is_able(module: nn.Module) -> bool:
    """Return whether no module inside is known to mix samples, to draw random numbers, or to have hooks."""
    for inside in module.modules():
        if inside._forward_hooks or inside._forward_pre_hooks or inside._backward_hooks or inside._backward_pre_hooks:
            return False
        if isinstance(inside, nn.modules.dropout._DropoutNd) and inside.training and inside.p > 0:
            return False
        if isinstance(inside, nn.modules.batchnorm._BatchNorm) and inside.training:
            return False
        # PyTorch's gradients are wrong for a single sample with the channels last (2.13).
        if isinstance(inside, nn.modules.instancenorm._InstanceNorm):
            return False
    return True


def segments_of(
    model: nn.Module, step: Callable[[nn.Module], object], parts: Sequence[Part]
) -> dict[Part, Segment | None]:
    """Run a step; return the segments of parts, None for one with other results, gradients or effects in its pieces.

    Such a part mixes samples or rows, or changes buffers or inputs; and some of PyTorch's own operators are wrong for a
    single sample.
    """
    found: dict[Part, Segment | None] = dict.fromkeys(parts)
    handles: list[RemovableHandle] = []

    def watch(part: Part) -> None:
        module = model.get_submodule(part.segment.module)
        function, entry = module, module
        if part.segment.first is not None and part.segment.last is not None:
            children = list(cast(nn.Sequential, module))[part.segment.first : part.segment.last + 1]
            function, entry = nn.Sequential(*children), children[0]

        def check(_: nn.Module, arguments: Any) -> None:
            handle.remove()
            segment = part.segment
            if part.bands > 1:
                segment = replace(segment, bands=bands_of(function, arguments, part.bands))
                if not segment.bands:
                    return
            # Gradients may come in either format, for which some of PyTorch's operators are not equally right.
            if all(_is_same(function, arguments, segment, is_last=is_last) for is_last in (False, True)):
                found[part] = segment

        handle = entry.register_forward_pre_hook(check)
        handles.append(handle)

    for part in parts:
        watch(part)
    try:
        step(model)
    finally:
        for handle in handles:
            handle.remove()
    return found


def without_mixing(parts: Sequence[Part], mixing: Sequence[Part]) -> list[Part]:
    """Return parts of which none has inside what is known to mix samples or rows."""
    left = []
    for part in parts:
        inside = [other for other in mixing if part.covers(other)]
        if any(other.bands > 1 for other in inside):
            part = replace(part, rows=0)
        if all(other.bands > 1 for other in inside) and (part.batch_size > 1 or part.rows):
            left.append(part)
    return left


def _is_same(function: nn.Module, inputs: Sequence[Tensor], segment: Segment, *, is_last: bool) -> bool:
    """Return whether results and gradients of a segment are those of the whole, up to rounding, without other effects.

    is_last: whether the gradient of the result has the channels last.
    """
    states, found = [], []
    parameters = [parameter for parameter in function.parameters() if parameter.requires_grad]
    for is_whole in (True, False):
        states.append((_random_states(inputs), [buffer._version for buffer in function.buffers()]))
        with torch.enable_grad():
            leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
            copies = [x.clone() for x in leaves]
            y = function(*copies) if is_whole else in_micro_batches(function, parameters, segment, copies)
        # An input that is written would be read once more by the backward pass.
        if not y.requires_grad or any(copy._version for copy in copies):
            return False
        dy = torch.randn(y.shape, generator=torch.Generator(y.device).manual_seed(0), dtype=y.dtype, device=y.device)
        if is_last and y.dim() in (4, 5):
            dy = dy.contiguous(memory_format=torch.channels_last if y.dim() == 4 else torch.channels_last_3d)
        wanted = [*(x for x in leaves if x.requires_grad), *parameters]
        found.append((y.detach(), torch.autograd.grad(y, wanted, dy, allow_unused=True)))
    (random, versions), (random_after, versions_after) = states
    if not all(map(torch.equal, random, random_after)) or versions != versions_after:
        return False
    (whole, gradients), (in_parts, others) = found
    of_parameters = gradients[len(gradients) - len(parameters) :]
    largest = max((float(one.norm()) for one in of_parameters if one is not None), default=0.0)
    if not _is_near(whole, in_parts, 2 * torch.finfo(whole.dtype).eps ** 0.5, 0.0):
        return False
    # Values near zero change their sign by rounding, and with it the derivative of an activation.
    of_gradients = zip(gradients, others, strict=True)
    return all(_is_near(one, other, _MOST_ERROR, 0.01 * largest) for one, other in of_gradients)


def _random_states(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the states of random numbers on the CPU and on the GPUs of the inputs."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(x.device) for x in inputs if x.is_cuda)]


def _is_near(one: Tensor | None, other: Tensor | None, tolerance: float, scale: float) -> bool:
    """Return whether tensors are equal, up to a share of their norm, or of ``scale`` if that is larger."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    difference, norm = (one.double() - other.double()).norm(), one.double().norm()
    return bool(difference <= tolerance * max(float(norm), scale))


def chosen_parts(
    values: Sequence[Value], numbers: Sequence[int], parts: Sequence[Part], budget_bytes: int
) -> list[Part]:
    """Return parts to run in micro-batches, so that a step is estimated to stay within the budget.

    There is one more part, around the value that needs the most memory by itself, as long as the budget is exceeded, or
    a step is faster with it. It is the part with which a step within the budget is the fastest. If no part is enough,
    it is the fastest of those that leave a quarter of the budget to what is kept.

    numbers: of the values, as the parts count them.
    """
    state = _State(tuple(values), tuple(numbers), 0.0, ())
    time_s = state.least_time_s(budget_bytes)
    while state.values and len(state.chosen) < _MOST_PARTS:
        merged = [state.merged(piece) for part in state.parts_of_the_peak(parts) for piece in part.in_pieces()]
        floor = min((after.least_bytes for after in merged), default=state.least_bytes)
        if floor > (1 - _LEAST_GAIN) * state.least_bytes:
            break
        merged.sort(key=lambda after: (after.time_s, -after.chosen[-1].share))
        fastest, fastest_s = None, inf
        for after in merged:
            after_s = after.least_time_s(budget_bytes) if after.time_s < fastest_s else inf
            if after_s < fastest_s:
                fastest, fastest_s = after, after_s
        if time_s < inf and fastest_s > (1 - _LEAST_GAIN) * time_s:
            break
        near_bytes = max(floor, 0.75 * budget_bytes)  # which leaves a quarter to what is kept
        state = fastest or next(after for after in merged if after.least_bytes <= near_bytes)
        time_s = fastest_s
    return list(state.chosen)


def _least_bytes(value: Value) -> int:
    """Return the memory that a step needs for a value, whatever is kept."""
    return max(value.forward_bytes + value.size_bytes, (value.backward_bytes + value.size_bytes) * value.is_used)


@dataclass(frozen=True, slots=True)
class _State:
    """The values of a step with some parts in micro-batches, each of which has become one value.

    time_s: of the parts, which the backward pass computes again.
    chosen: the parts.
    """

    values: tuple[Value, ...]
    numbers: tuple[int, ...]
    time_s: float
    chosen: tuple[Part, ...]

    @property
    def least_bytes(self) -> int:
        return max(map(_least_bytes, self.values), default=0)

    def least_time_s(self, budget_bytes: int) -> float:
        """Return the time of what is computed again within a budget; infinity if that is not possible."""
        keeping = solver.least_time(self.values, budget_bytes) if self.least_bytes <= budget_bytes else None
        return inf if keeping is None else self.time_s + keeping.time_s

    def parts_of_the_peak(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that compute the value that needs the most memory by itself, or read it, as gradients do."""
        peak = max(range(len(self.values)), key=lambda index: _least_bytes(self.values[index]))
        numbers = [
            number
            for index, (number, value) in enumerate(zip(self.numbers, self.values, strict=True))
            if index == peak or peak in value.reads
        ]
        return [
            part
            for part in parts
            if part.is_apart(self.chosen) and any(part.start <= number < part.end for number in numbers)
        ]

    def merged(self, part: Part) -> _State:
        """Return the state in which one more part runs in pieces."""
        first, last = bisect_left(self.numbers, part.start), bisect_left(self.numbers, part.end) - 1
        before, inside, share = self.values[:first], self.values[first : last + 1], part.share
        reads = sorted({read for value in inside for read in value.reads if read < first})
        # The result is not among the values if it is small, or no gradient needs it.
        read_later = {read for value in self.values[last + 1 :] for read in value.reads}
        results = [
            place
            for place in range(first, last + 1)
            if self.values[place].size_bytes == part.y_bytes
            and (place in read_later or self.numbers[place] == part.end - 1)
        ]
        y = self.values[results[-1]] if results else Value(0, 0.0, is_used=False)
        inner = [self.values[place] for place in range(first, last + 1) if place not in results[-1:]]
        # In the backward pass: the ends of the part and their gradients, and a share of what is inside.
        read_bytes = max((self.values[read].backward_bytes for read in reads), default=0)
        inner_bytes = sum(value.size_bytes for value in inner)
        inner_bytes += max([read_bytes, *(value.backward_bytes for value in inner)])
        run_bytes = part.x_bytes + part.y_bytes + int(share * inner_bytes)
        # The part is computed once more. The halo is computed in both, with gradients that take twice as long.
        time_s = sum(value.time_s for value in inside) * (4 * part.repetition - 3)
        forward_bytes = int(share * max(value.forward_bytes + value.size_bytes for value in inside))
        y = replace(y, reads=tuple(reads), time_s=time_s, forward_bytes=forward_bytes)
        if reads:  # the last of them is read when the part begins
            x = replace(before[reads[-1]], backward_bytes=run_bytes)
            before = *before[: reads[-1]], x, *before[reads[-1] + 1 :]
        else:
            y = replace(y, is_used=True, backward_bytes=max(y.backward_bytes, run_bytes - y.size_bytes))

        def moved(read: int) -> int:
            return read if read < first else first if read <= last else read - (last - first)

        after = (
            replace(value, reads=tuple(sorted({moved(read) for read in value.reads})))
            for value in self.values[last + 1 :]
        )
        numbers = *self.numbers[:first], *self.numbers[last:]
        return _State((*before, y, *after), numbers, self.time_s + time_s, (*self.chosen, part))
