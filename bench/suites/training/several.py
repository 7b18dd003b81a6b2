"""Measures training steps of several sources of models, one after the other."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mucudnn.bench.sources.blame import blamed_in_training
from mucudnn.bench.sources.layers import NETWORKS, importable
from mucudnn.bench.sources.networks import input_shape_of, objective_for
from mucudnn.bench.sources.trainable import trainable_model
from mucudnn.bench.sources.trainee import Trainee, labelled_batches
from mucudnn.bench.suites.training.benchmark import TrainingOptions, known_precisions, measure_training
from mucudnn.bench.suites.training.result import Precision, VariantResult
from mucudnn.measuring.operands import input_shape
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import share_of

_Shape = tuple[int, int, int]
_Sizes = dict[tuple[str, int], _Shape]  # source and batch size -> (C, H, W) of an image


def measure_sources(
    sources: Sequence[str],
    batch_sizes: Sequence[int],
    *,
    input_size: _Shape | None = None,
    device: str = "cpu",
    precisions: Sequence[Precision] | None = None,
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat),
    options: TrainingOptions | None = None,
) -> Iterator[tuple[VariantResult, ...]]:
    """Measure the model of each source as ``measure_training`` does, with the options' time for all of them together.

    sources: networks by name, and the user's own models, as for ``load_model``, which learn to give small outputs.
    batch_sizes: one for each. What is there twice is measured once. input_size: (C, H, W) of an image; ``None``: each
    network's own.

    Raises ``InvalidInputError`` before anything is measured: for what has no model or cannot be trained, too large a
    batch, or a precision that the device does not have.
    """
    asked = known_precisions(precisions, device)
    pairs = dict.fromkeys(zip(sources, batch_sizes, strict=True))
    sizes = {(source, batch_size): _shape_of(source, batch_size, input_size) for source, batch_size in pairs}
    return _measured(sizes, device, asked, memory_formats, options or TrainingOptions())


def _shape_of(source: str, batch_size: int, input_size: _Shape | None) -> _Shape:
    """Return the (C, H, W) of an image.

    A step of the user's own model is run, to find out whether it can be trained.
    """
    if source in NETWORKS:
        shape = input_size or input_shape_of(source)
        input_shape(batch_size, shape)
        return shape
    model, shape = trainable_model(source, input_shape=input_size)
    ((images, labels),) = labelled_batches(1, batch_size, shape)
    objective = objective_for(source)
    with blamed_in_training(source, images.shape):
        trainee = Trainee(copy.deepcopy(model).train(), objective=objective)
        trainee.learn(objective.arguments(images), objective.target(images, labels))
    return shape


def _measured(
    sizes: _Sizes,
    device: str,
    precisions: Sequence[Precision],
    memory_formats: Sequence[MemoryFormat],
    options: TrainingOptions,
) -> Iterator[tuple[VariantResult, ...]]:
    begun_s = time.monotonic()
    for index, ((source, batch_size), shape) in enumerate(sizes.items()):
        progress = share_of(options.progress, index / len(sizes), 1 / len(sizes))
        torch.manual_seed(0)  # a model has the same parameters, whatever was measured before it
        model, _ = trainable_model(source, input_shape=shape)
        with importable(source):  # the processes inherit the path
            yield from measure_training(
                source,
                model.train(),
                shape,
                batch_size=batch_size,
                device=device,
                precisions=precisions,
                memory_formats=memory_formats,
                objective=objective_for(source),
                options=replace(options, progress=progress, begun_s=begun_s),
            )
