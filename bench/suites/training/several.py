"""Measures training steps of several built-in networks, one network after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mucudnn.bench.measure.operands import input_shape
from mucudnn.bench.sources import networks
from mucudnn.bench.suites.training.benchmark import TrainingOptions, known_precisions, measure_training
from mucudnn.bench.suites.training.result import Precision, VariantResult
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import share_of

_Sizes = dict[tuple[str, int], tuple[int, int, int]]  # name and batch size -> (C, H, W) of an image


def measure_networks(
    names: Sequence[str],
    batch_sizes: Sequence[int],
    *,
    device: str = "cpu",
    precisions: Sequence[Precision] | None = None,
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat),
    options: TrainingOptions | None = None,
) -> Iterator[tuple[VariantResult, ...]]:
    """Measure each network as ``measure_training`` does, with the options' time for all of them together.

    batch_sizes: one for each name. What is there twice is measured once.

    Raises ``InvalidInputError`` before anything is measured: for an unknown name, too large a batch, or a precision
    that the device does not have.
    """
    asked = known_precisions(precisions, device)
    sizes = {pair: networks.input_shape_of(pair[0]) for pair in zip(names, batch_sizes, strict=True)}
    for (_, batch_size), shape in sizes.items():
        input_shape(batch_size, shape)
    return _measured(sizes, device, asked, memory_formats, options or TrainingOptions())


def _measured(
    sizes: _Sizes,
    device: str,
    precisions: Sequence[Precision],
    memory_formats: Sequence[MemoryFormat],
    options: TrainingOptions,
) -> Iterator[tuple[VariantResult, ...]]:
    begun_s = time.monotonic()
    for index, ((name, batch_size), shape) in enumerate(sizes.items()):
        progress = share_of(options.progress, index / len(sizes), 1 / len(sizes))
        torch.manual_seed(0)  # a network has the same parameters, whatever was measured before it
        yield from measure_training(
            name,
            networks.build(name),
            shape,
            batch_size=batch_size,
            device=device,
            precisions=precisions,
            memory_formats=memory_formats,
            objective=networks.objective_of(name),
            options=replace(options, progress=progress, begun_s=begun_s),
        )
