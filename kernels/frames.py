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
from mucudnn.kernels.algorithm import Algorithm, BaseAlgorithm, BoundStage, Epilogue, Prologue, Workspace
from mucudnn.kernels.compiled import algorithms as compiled
from mucudnn.kernels.memory import ALIGNMENT_BYTES, Part, aligned, carve, carved_bytes, dense_strides, torch_dtype
from mucudnn.kernels.torch_ops.native import NATIVE_ALGORITHM, NATIVE_ON_CUDA

_ELEMENTS_OF_PASS = 2**20  # of the result: the sum of a tap, which is in scratch, and its images stay in the cache


@dataclass(frozen=True, slots=True)
class Pass:
    """A convolution of images: some frames of y, and the frames of x that one tap of the filter reads for them.

    tap: index of the filter element along the depth.
    is_first: whether no pass before wrote these frames of the result; False for BACKWARD_FILTER.
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
        [inside(tap * dilation - frames.before, stride, frames.x, frames.y) for tap in range(problem.t)]
        for frames in (depth_of(problem), depth)
    )
    largest = max(problem.d, problem.positions[0])
    if operation is not Operation.BACKWARD_FILTER:
        _, image_shape = _frames(problem)[0 if operation is Operation.BACKWARD_DATA else 1]
        largest = max(_ELEMENTS_OF_PASS // prod(image_shape), 1)
    written: set[int] = set()
    convolutions = []
    for tap in sorted(range(problem.t), key=lambda tap: whole[tap][0].start - whole[tap][0].stop):
        ys, xs = ranges[tap]
        pairs = list(zip(range(depth.x)[xs], range(depth.y)[ys], strict=True))
        while pairs:
            targets = [x if operation is Operation.BACKWARD_DATA else y for x, y in pairs]
            are_first = [operation is not Operation.BACKWARD_FILTER and frame not in written for frame in targets]
            is_first, count = are_first[0], 1
            while stride == 1 and count < min(len(pairs), largest) and are_first[count] is is_first:
                count += 1
            (x, y), written = pairs[0], written | {*targets[:count]}
            convolutions.append(Pass(tap, slice(x, x + count), slice(y, y + count), count, is_first))
            pairs = pairs[count:]
    return tuple(convolutions)


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
        is_torchs = self.inner.name == "native"
        return self.inner.is_local(frame_of(problem)) and not (is_torchs and problem.item_bytes < 4)

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        frames = sum(convolution.count for convolution in passes(problem, depth_of(problem)))
        return self.inner.least_flops(frame_of(problem), frames * micro_batch_size)

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        images, counts = frame_of(problem), _counts(problem, micro_batch_size, depth_of(problem))
        return next(filter(None, (self.inner.supports_micro_batch(images, count) for count in counts)), None)

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        images, counts = frame_of(problem), _counts(problem, micro_batch_size, depth_of(problem))
        return max(self.inner.internal_bytes(images, count) for count in counts)

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        images, depth = frame_of(problem), depth_of(problem)
        workspaces = (self.inner.workspace(images, count) for count in _counts(problem, micro_batch_size, depth))
        inner_bytes = max(workspace.prepared_bytes for workspace in workspaces)
        parts = [_filter_part(problem), Part((aligned(inner_bytes),), torch.uint8)]
        prepared_bytes = carved_bytes(parts * len(taps_and_frames(problem)))
        return Workspace(prepared_bytes, carved_bytes(self._scratch_parts(problem, micro_batch_size, depth)))

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
        if not isinstance(self.inner, compiled.CompiledAlgorithm) or problem.operation is Operation.BACKWARD_FILTER:
            return None
        if problem.memory_format is MemoryFormat.CONTIGUOUS:
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
        by_tap = {tap: (filters, inners) for tap, filters, inners in self._prepared(problem, prepared)}
        *parts, inner_scratch = carve(scratch, self._scratch_parts(problem, x.shape[0], depth))

        # Copy what is read, where frames are not images in memory.
        copied_x, copied_y = (parts.pop(0) if is_copied else None for is_copied in _are_copied(problem))
        written = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x}.get(operation)
        for copied, whole in ((copied_x, x), (copied_y, y)):
            if copied is not None and whole is not written:
                copied.copy_(whole.movedim(2, 0))

        # Convolve: the first pass of each frame of the result writes it, the others add to it.
        for frames_x, frames_y in zip(_blocks(problem, x, copied_x), _blocks(problem, y, copied_y), strict=True):
            if operation is not Operation.BACKWARD_FILTER:
                target = frames_x if operation is Operation.BACKWARD_DATA else frames_y
                for frame in _unread(problem, depth):
                    target[frame].zero_() if bias is None else target[frame].copy_(bias.view(-1, 1, 1))
            for convolution in passes(problem, depth):
                filters, inners = by_tap[convolution.tap]
                part_x, part_y = _batch(images, frames_x[convolution.x]), _batch(images, frames_y[convolution.y])
                if operation is Operation.BACKWARD_FILTER or convolution.is_first:
                    self.inner.step(images, part_x, filters, part_y, bias, inners, inner_scratch)
                elif operation is Operation.BACKWARD_DATA:
                    tap_sum = _dense(parts[0], tuple(part_x.shape), images)
                    self.inner.step(images, tap_sum, filters, part_y, None, inners, inner_scratch)
                    part_x.add_(tap_sum)
                else:
                    tap_sum = _dense(parts[0], tuple(part_y.shape), images)
                    self.inner.step(images, part_x, filters, tap_sum, None, inners, inner_scratch)
                    part_y.add_(tap_sum)

        for copied, whole in ((copied_x, x), (copied_y, y)):
            if copied is not None and whole is written:
                whole.movedim(2, 0).copy_(copied)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        images = frame_of(problem)
        for tap, filters, inners in self._prepared(problem, prepared):
            self.inner.close(images, filters, inners)
            if problem.operation is Operation.BACKWARD_FILTER:
                w[:, :, tap].add_(filters)

    def _prepared(self, problem: ConvProblem, prepared: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each tap that is used, its filter (or gradient), and what ``inner`` prepares for it."""
        images, taps, filters = frame_of(problem), [*taps_and_frames(problem)], _filter_part(problem)
        # The bytes depend on the size of the micro-batch, which is unknown here: each tap has an equal share.
        tap_bytes = prepared.nbytes // len(taps) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        for index, tap in enumerate(taps):
            share = prepared[index * tap_bytes : (index + 1) * tap_bytes]
            stored, inners = carve(share, [filters, Part((tap_bytes - aligned(filters.size_bytes),), torch.uint8)])
            yield tap, _dense(stored, images.w_shape(), images), inners

    def _scratch_parts(self, problem: ConvProblem, n: int, depth: Depth) -> list[Part]:
        """Return the parts for copies of x and y by frames, (D, n, C, H, W), the sum of a tap, and ``inner``'s scratch.

        The copies are there only if needed, the sum unless the operation is BACKWARD_FILTER.
        """
        images, dtype = frame_of(problem), torch_dtype(problem)
        parts = []
        for is_copied, (count, image_shape) in zip(_are_copied(problem), _frames(problem), strict=True):
            if is_copied:
                parts.append(Part((count, n, *image_shape), dtype))
        if problem.operation is not Operation.BACKWARD_FILTER:
            _, image_shape = _frames(problem)[0 if problem.operation is Operation.BACKWARD_DATA else 1]
            counts = (convolution.count for convolution in passes(problem, depth) if not convolution.is_first)
            parts.append(Part((max(counts, default=0) * _images_of_frame(problem, n) * prod(image_shape),), dtype))
        workspaces = (self.inner.workspace(images, count) for count in _counts(problem, n, depth))
        inner_bytes = max((workspace.scratch_bytes for workspace in workspaces), default=0)
        return [*parts, Part((inner_bytes,), torch.uint8)]


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
        prologue: Prologue | None = None,
        /,
    ) -> None:
        problem, n, depth = self.problem, self.n, self.depth
        dtype, layout = torch_dtype(problem), problem.memory_format
        x_shape, y_shape = (n, problem.c, depth.x, problem.h, problem.w), (n, problem.k, depth.y, problem.p, problem.q)
        frames_x, frames_y = (
            _at(address, prod(shape) * dtype.itemsize).view(dtype).as_strided(shape, dense_strides(shape, layout))
            for address, shape in ((x, x_shape), (y, y_shape))
        )
        offsets = None if bias is None else _at(bias, problem.k * dtype.itemsize).view(dtype)
        buffers = _at(prepared, self.workspace.prepared_bytes), _at(scratch, self.workspace.scratch_bytes)
        self.frames._sum(problem, depth, frames_x, frames_y, offsets, *buffers)


def _at(address: int, size_bytes: int) -> Tensor:
    """Return the memory at an address as a tensor, which must not outlive it."""
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8)


def _filter_part(problem: ConvProblem) -> Part:
    """Return the part for the filter (or gradient) of a tap."""
    return Part((prod(frame_of(problem).w_shape()),), torch_dtype(problem))


def _unread(problem: ConvProblem, depth: Depth) -> list[int]:
    """Return the frames of the result that no pass writes."""
    is_of_data = problem.operation is Operation.BACKWARD_DATA
    written = (convolution.x if is_of_data else convolution.y for convolution in passes(problem, depth))
    frames = {*range(depth.x if is_of_data else depth.y)}
    return sorted(frames.difference(*(range(part.start, part.stop) for part in written)))


# Frames in memory. Where x or y has a single frame, or is channels_last, its frames are dense images as they are.


def _frames(problem: ConvProblem) -> list[tuple[int, tuple[int, int, int]]]:
    """Return the number of frames, and the shape of each, of x and of y."""
    return [(problem.d, (problem.c, problem.h, problem.w)), (problem.positions[0], (problem.k, problem.p, problem.q))]


def _are_copied(problem: ConvProblem) -> list[bool]:
    """Return whether the frames of x, and those of y, are copied to scratch."""
    return [problem.memory_format is MemoryFormat.CONTIGUOUS and count > 1 for count, _ in _frames(problem)]


def _images_of_frame(problem: ConvProblem, n: int) -> int:
    """Return the number of images in a frame of a block: of all samples, or of one."""
    is_single = problem.d == problem.positions[0] == 1
    return n if problem.memory_format is MemoryFormat.CONTIGUOUS or is_single else 1


def _counts(problem: ConvProblem, n: int, depth: Depth) -> list[int]:
    """Return the numbers of images that passes convolve at once."""
    return sorted({convolution.count * _images_of_frame(problem, n) for convolution in passes(problem, depth)})


def _blocks(problem: ConvProblem, volumes: Tensor, copied: Tensor | None) -> list[Tensor]:
    """Return views (D, n, C, H, W) of x or y, in each of which adjacent frames are one dense batch of images."""
    if copied is not None:
        return [copied]
    n, frames = volumes.shape[0], volumes.movedim(2, 0)
    return [frames] if _images_of_frame(problem, n) == n else [frames[:, i : i + 1] for i in range(n)]


def _batch(images: ConvProblem, frames: Tensor) -> Tensor:
    """Return adjacent frames (D, n, C, H, W) as a view of one batch of images.

    Strides of dimensions of size 1 are set, too: torch 2.13 convolves with wrong formats if they are unusual.
    """
    count, n, *image_shape = frames.shape
    return _dense(frames, (count * n, *image_shape), images)


def _dense(stored: Tensor, shape: tuple[int, ...], images: ConvProblem) -> Tensor:
    """Return the memory from a tensor's first element on as a dense tensor in the memory format of the images."""
    return stored.as_strided(shape, dense_strides(shape, images.memory_format))


ALGORITHMS = tuple(Frames(inner) for inner in (NATIVE_ALGORITHM, *compiled.ALGORITHMS))
ON_CUDA = (Frames(NATIVE_ON_CUDA),)
