"""Convolution of volumes as a sum of convolutions of images: one for each tap of the filter along the depth.

With a filter of depth T, frame o of y is the sum of T convolutions of images,

    y[o] = sum over t of  x[o * stride - padding + t * dilation] * w[t]

and a tap that reads only padding costs nothing: of a clip of one frame, or with causal padding, only a slice of the
filter is used. Each tap is computed for all its frames at once by an algorithm for images, and added by torch to the
taps before. (Winograd has a form of its own for volumes, in C++.)

In channels_last the frames of a sample are dense images in memory, and are used in place. Contiguous volumes keep the
frames of each channel together, so they are copied to scratch, frame by frame; a single frame is in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, frame_of, inside, taps_and_frames
from mucudnn.kernels.algorithm import Algorithm, BaseAlgorithm, BoundStage, Epilogue, Workspace
from mucudnn.kernels.compiled import algorithms as compiled
from mucudnn.kernels.memory import ALIGNMENT_BYTES, Part, aligned, carve, carved_bytes, dense_strides, torch_dtype
from mucudnn.kernels.torch_ops.native import NATIVE_ALGORITHM, NATIVE_ON_CUDA

_ELEMENTS_OF_PASS = 2**20  # of the result: the sum of a tap, which is in scratch, and its images stay in the cache


@dataclass(frozen=True, slots=True)
class Pass:
    """A convolution of images: some frames of y, and the frames of x that one tap of the filter reads for them.

    tap: index of the filter element along the depth. is_first: whether no pass before wrote these frames of the result;
    False for BACKWARD_FILTER.
    """

    tap: int
    x: slice
    y: slice
    count: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class Depth:
    """The depths of x and of y, or of a band of them, and how many frames of padding are before those of x."""

    x: int
    y: int
    before: int


def depth_of(problem: ConvProblem) -> Depth:
    return Depth(problem.d, problem.positions[0], problem.padding[0])


@lru_cache(maxsize=1024)
def passes(problem: ConvProblem, depth: Depth) -> tuple[Pass, ...]:
    """Return the passes of a problem, or of a band of frames, in the order in which they are computed.

    Frames that a stride separates are not adjacent in memory, so that each gets a pass of its own; other passes are
    bounded, since the sum of a tap is in scratch. The tap that writes the most frames of the whole comes first, so that
    the order of the sums does not depend on the bands.
    """
    (stride, *_), (dilation, *_), operation = problem.stride, problem.dilation, problem.operation
    whole, ranges = (
        [(t, *inside(t * dilation - of.before, stride, of.x, of.y)) for t in range(problem.t)]
        for of in (depth_of(problem), depth)
    )
    most = max(problem.d, problem.positions[0])
    if operation is not Operation.BACKWARD_FILTER:
        _, of_one = _frames(problem)[0 if operation is Operation.BACKWARD_DATA else 1]
        most = max(_ELEMENTS_OF_PASS // prod(of_one), 1)
    written: set[int] = set()
    found = []
    for tap, ys, xs in sorted(ranges, key=lambda each: whole[each[0]][1].start - whole[each[0]][1].stop):
        pairs = list(zip(range(depth.x)[xs], range(depth.y)[ys], strict=True))
        while pairs:
            targets = [x if operation is Operation.BACKWARD_DATA else y for x, y in pairs]
            are_first = [operation is not Operation.BACKWARD_FILTER and one not in written for one in targets]
            is_first, count = are_first[0], 1
            while stride == 1 and count < min(len(pairs), most) and are_first[count] is is_first:
                count += 1
            (x, y), written = pairs[0], written | {*targets[:count]}
            found.append(Pass(tap, slice(x, x + count), slice(y, y + count), count, is_first))
            pairs = pairs[count:]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Frames(BaseAlgorithm):
    """Convolution of volumes by an algorithm for images, ``inner``, frame by frame."""

    inner: Algorithm

    takes_volumes = True

    @property
    def name(self) -> str:
        return f"frames-{self.inner.name}"

    @property
    def version(self) -> int:  # a change of the inner algorithm's speed is one of this algorithm's
        return self.inner.version

    @property
    def device_type(self) -> str:  # type: ignore[override]
        return self.inner.device_type

    @property
    def deterministic(self) -> bool:
        return self.inner.deterministic

    def is_foreign(self, problem: ConvProblem) -> bool:
        return self.inner.is_foreign(frame_of(problem))

    def supports(self, problem: ConvProblem) -> str | None:
        if not problem.is_volume:
            return "x has no depth; frames are those of a volume"
        if not passes(problem, depth_of(problem)):
            return f"the depth of {problem.d} is all in the padding, so that no frame is read"
        return self.inner.supports(frame_of(problem))

    def is_local(self, problem: ConvProblem) -> bool:
        """Return False for halves by torch's own, which spread NaN further than ``Conv3d`` does where there is AMX."""
        of_torch = self.inner.name == "native"
        return self.inner.is_local(frame_of(problem)) and not (of_torch and problem.item_bytes < 4)

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        frames = sum(each.count for each in passes(problem, depth_of(problem)))
        return self.inner.least_flops(frame_of(problem), frames * micro_batch_size)

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        images = frame_of(problem)
        reasons = (
            self.inner.supports_micro_batch(images, n) for n in _counts(problem, micro_batch_size, depth_of(problem))
        )
        return next(filter(None, reasons), None)

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        images = frame_of(problem)
        return max(self.inner.internal_bytes(images, n) for n in _counts(problem, micro_batch_size, depth_of(problem)))

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        scratch = self._scratch_parts(problem, micro_batch_size, depth_of(problem))
        return Workspace(carved_bytes(self._prepared_parts(problem, micro_batch_size)), carved_bytes(scratch))

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        images = frame_of(problem)
        for tap, filters, inners in self._prepared(problem, prepared):
            if problem.operation is Operation.BACKWARD_FILTER:
                filters.zero_()
            else:
                filters.copy_(w[:, :, tap])
            self.inner.open(images, filters, inners)

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        self._sum(problem, depth_of(problem), x, y, bias, prepared, scratch)

    def band(
        self, problem: ConvProblem, n: int, rows: tuple[int, int], above: int
    ) -> tuple[BoundStage, Workspace] | None:
        """Return a callable for some frames, which take the place of rows."""
        is_one = (
            isinstance(self.inner, compiled.CompiledAlgorithm) and problem.operation is not Operation.BACKWARD_FILTER
        )
        if not is_one or problem.memory_format is MemoryFormat.CONTIGUOUS:
            return None
        depth = Depth(*rows, above)
        scratch_bytes = carved_bytes(self._scratch_parts(problem, n, depth))
        workspace = Workspace(self.workspace(problem, 1).prepared_bytes, scratch_bytes)
        return _Band(self, problem, n, depth, workspace), workspace

    def _sum(
        self,
        problem: ConvProblem,
        depth: Depth,
        x: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        """Compute ``step`` for frames of x and y."""
        images, operation = frame_of(problem), problem.operation
        of_x, of_y, beside, inner_scratch = self._split_scratch(problem, x.shape[0], depth, scratch)
        by_tap = {tap: (filters, inners) for tap, filters, inners in self._prepared(problem, prepared)}
        written = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x}.get(operation)
        for copied, whole in ((of_x, x), (of_y, y)):
            if copied is not None and whole is not written:
                copied.copy_(_by_frame(whole))
        for frames_x, frames_y in zip(_blocks(problem, x, of_x), _blocks(problem, y, of_y), strict=True):
            target = frames_x if operation is Operation.BACKWARD_DATA else frames_y
            if operation is not Operation.BACKWARD_FILTER:
                for frame in _unread(problem, depth):
                    target[frame].zero_() if bias is None else target[frame].copy_(bias.view(-1, 1, 1))
            for each in passes(problem, depth):
                filters, inners = by_tap[each.tap]
                part_x, part_y = _batch(images, frames_x[each.x]), _batch(images, frames_y[each.y])
                if operation is Operation.BACKWARD_FILTER:
                    self.inner.step(images, part_x, filters, part_y, None, inners, inner_scratch)
                    continue
                source, result = (part_x, part_y) if operation is Operation.FORWARD else (part_y, part_x)
                if each.is_first:
                    self._into(images, source, filters, result, bias, inners, inner_scratch)
                else:
                    assert beside is not None
                    sum_of_tap = _dense(beside, tuple(result.shape), images)
                    self._into(images, source, filters, sum_of_tap, None, inners, inner_scratch)
                    result.add_(sum_of_tap)
        for copied, whole in ((of_x, x), (of_y, y)):
            if copied is not None and whole is written:
                _by_frame(whole).copy_(copied)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        images = frame_of(problem)
        for tap, filters, inners in self._prepared(problem, prepared):
            self.inner.close(images, filters, inners)
            if problem.operation is Operation.BACKWARD_FILTER:
                w[:, :, tap].add_(filters)

    def _into(
        self,
        images: ConvProblem,
        source: Tensor,
        filters: Tensor,
        result: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        x, y = (result, source) if images.operation is Operation.BACKWARD_DATA else (source, result)
        self.inner.step(images, x, filters, y, bias, prepared, scratch)

    def _prepared_parts(self, problem: ConvProblem, n: int) -> list[Part]:
        """Return, for each tap that is used, the parts for its filter (or gradient) and what ``inner`` prepares."""
        images = frame_of(problem)
        filters = Part((prod(images.w_shape()),), torch_dtype(problem))
        inners = max(w.prepared_bytes for w in self._inner_workspaces(problem, n, depth_of(problem)))
        return [filters, Part((aligned(inners),), torch.uint8)] * len(_taps(problem))

    def _prepared(self, problem: ConvProblem, prepared: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each tap that is used, its filter (or gradient), and what ``inner`` prepares for it."""
        images, taps = frame_of(problem), _taps(problem)
        filters = Part((prod(images.w_shape()),), torch_dtype(problem))
        # The bytes depend on the size of the micro-batch, which is unknown here: each tap has an equal share.
        of_tap = prepared.nbytes // len(taps) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        for index, tap in enumerate(taps):
            share = prepared[index * of_tap : (index + 1) * of_tap]
            stored, inners = carve(share, [filters, Part((of_tap - aligned(filters.size_bytes),), torch.uint8)])
            yield tap, _dense(stored, images.w_shape(), images), inners

    def _inner_workspaces(self, problem: ConvProblem, n: int, depth: Depth) -> list[Workspace]:
        images = frame_of(problem)
        return [self.inner.workspace(images, count) for count in _counts(problem, n, depth)]

    def _scratch_parts(self, problem: ConvProblem, n: int, depth: Depth) -> list[Part]:
        """Return the parts for copies of x and y by frames, the sum of a tap, and the scratch of ``inner``."""
        dtype = torch_dtype(problem)
        both = zip(_are_copied(problem), _frames(problem), strict=True)
        parts = [Part((count, n, *of_one), dtype) for is_copied, (count, of_one) in both if is_copied]
        if problem.operation is not Operation.BACKWARD_FILTER:
            _, of_one = _frames(problem)[0 if problem.operation is Operation.BACKWARD_DATA else 1]
            most = max((each.count for each in passes(problem, depth) if not each.is_first), default=0)
            parts.append(Part((most * _images_of_frame(problem, n) * prod(of_one),), dtype))
        inner_bytes = max((w.scratch_bytes for w in self._inner_workspaces(problem, n, depth)), default=0)
        return [*parts, Part((inner_bytes,), torch.uint8)]

    def _split_scratch(
        self, problem: ConvProblem, n: int, depth: Depth, scratch: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """Return copies of x and y, (D, n, C, H, W), the sum of a tap, all None if not needed, and inner's scratch."""
        *parts, inner = carve(scratch, self._scratch_parts(problem, n, depth))
        of_x, of_y = (parts.pop(0) if is_copied else None for is_copied in _are_copied(problem))
        return of_x, of_y, parts[0] if parts else None, inner


@dataclass(frozen=True, slots=True)
class _Band:
    """A stage that computes some frames of ``n`` samples in channels_last."""

    frames: Frames
    problem: ConvProblem
    n: int
    depth: Depth
    workspace: Workspace
    entry = None

    def __call__(
        self,
        x: int,
        w: int,
        y: int,
        bias: int | None,
        prepared: int,
        scratch: int,
        epilogue: Epilogue | None = None,
        /,
    ) -> None:
        problem, n, depth = self.problem, self.n, self.depth
        dtype, layout = torch_dtype(problem), problem.memory_format
        of_x, of_y = (n, problem.c, depth.x, problem.h, problem.w), (n, problem.k, depth.y, problem.p, problem.q)
        xs, ys = (
            _at(address, prod(shape) * dtype.itemsize).view(dtype).as_strided(shape, dense_strides(shape, layout))
            for address, shape in ((x, of_x), (y, of_y))
        )
        added = None if bias is None else _at(bias, problem.k * dtype.itemsize).view(dtype)
        buffers = _at(prepared, self.workspace.prepared_bytes), _at(scratch, self.workspace.scratch_bytes)
        self.frames._sum(problem, depth, xs, ys, added, *buffers)


def _at(address: int, size_bytes: int) -> Tensor:
    """Return the memory at an address as a tensor, which must not outlive it."""
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8)


def _taps(problem: ConvProblem) -> list[int]:
    return sorted(taps_and_frames(problem))


def _unread(problem: ConvProblem, depth: Depth) -> list[int]:
    """Return the frames of the result that no pass writes."""
    of_data = problem.operation is Operation.BACKWARD_DATA
    written = (each.x if of_data else each.y for each in passes(problem, depth))
    frames = {*range(depth.x if of_data else depth.y)}
    return sorted(frames.difference(*(range(each.start, each.stop) for each in written)))


# Frames in memory. Where x or y has a single frame, or is channels_last, its frames are dense images as they are.


def _frames(problem: ConvProblem) -> list[tuple[int, tuple[int, int, int]]]:
    """Return the number of frames, and the shape of each, of x and of y."""
    of_x, of_y = (problem.c, problem.h, problem.w), (problem.k, problem.p, problem.q)
    return [(problem.d, of_x), (problem.positions[0], of_y)]


def _are_copied(problem: ConvProblem) -> list[bool]:
    """Return whether the frames of x, and those of y, are copied to scratch."""
    return [problem.memory_format is MemoryFormat.CONTIGUOUS and count > 1 for count, _ in _frames(problem)]


def _images_of_frame(problem: ConvProblem, n: int) -> int:
    """Return the number of images in a frame of a block: of all samples, or of one."""
    is_single = problem.d == problem.positions[0] == 1
    return n if problem.memory_format is MemoryFormat.CONTIGUOUS or is_single else 1


def _counts(problem: ConvProblem, n: int, depth: Depth) -> list[int]:
    """Return the numbers of images that passes convolve at once."""
    return sorted({each.count * _images_of_frame(problem, n) for each in passes(problem, depth)})


def _by_frame(volumes: Tensor) -> Tensor:
    """Return (N, C, D, H, W) as a view (D, N, C, H, W)."""
    return volumes.movedim(2, 0)


def _blocks(problem: ConvProblem, volumes: Tensor, copied: Tensor | None) -> list[Tensor]:
    """Return views (D, n, C, H, W) of x or y, in each of which adjacent frames are one dense batch of images."""
    if copied is not None:
        return [copied]
    n = volumes.shape[0]
    of_frames = _by_frame(volumes)
    return [of_frames] if _images_of_frame(problem, n) == n else [of_frames[:, i : i + 1] for i in range(n)]


def _batch(images: ConvProblem, frames: Tensor) -> Tensor:
    """Return adjacent frames (D, n, C, H, W) as a view of one batch of images.

    Strides of dimensions of size 1 are set, too: torch 2.13 convolves with wrong formats if they are unusual.
    """
    count, n, *of_one = frames.shape
    return _dense(frames, (count * n, *of_one), images)


def _dense(stored: Tensor, shape: tuple[int, ...], images: ConvProblem) -> Tensor:
    """Return the memory from a tensor's first element on as a dense tensor in the memory format of the images."""
    return stored.as_strided(shape, dense_strides(shape, images.memory_format))


ALGORITHMS = tuple(Frames(inner) for inner in (NATIVE_ALGORITHM, *compiled.ALGORITHMS))
ON_CUDA = (Frames(NATIVE_ON_CUDA),)
