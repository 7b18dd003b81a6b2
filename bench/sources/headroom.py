"""Finds the headroom in a training step of a source's model, and its convolutions module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from mucudnn.bench.sources.blame import blamed_in_training
from mucudnn.bench.sources.layers import Layer, LayerTable, load_model, load_source
from mucudnn.bench.sources.networks import arguments_for
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.tracing.headroom import Headroom, find_headroom
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MemoryFormat


def table_with_headroom(
    source: str,
    *,
    batch: int | None = None,
    input_shape: tuple[int, int, int] | None = None,
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    device: str = "cpu",
) -> tuple[LayerTable, Headroom]:
    """The layers of ``load_source``, and the headroom of one step with ``batch`` samples (``None``: one) on a device.

    Modules with the same geometry do not share a layer of the table: each has a headroom of its own. Other arguments
    are those of ``load_source``.

    Raises as ``load_source`` and ``find_headroom``, and ``InvalidInputError`` for sources without a model, for models
    that cannot be trained on this input, and for those whose step runs no convolution.
    """
    table = load_source(source, batch=batch, input_shape=input_shape, dtype=dtype, memory_format=memory_format)
    model, shape = load_model(source, input_shape=input_shape, dtype=dtype, memory_format=memory_format)
    sample = torch.zeros(batch or 1, *shape, dtype=getattr(torch, dtype))
    sample = sample.to(device=device, memory_format=TORCH_FORMATS[memory_format])
    with blamed_in_training(source, sample.shape):
        headroom = find_headroom(model.to(device=device), arguments_for(source, sample))
    if not headroom.timeline.calls:
        raise InvalidInputError(f"{source} runs no convolution in a training step: there is no headroom to use")
    return module_by_module(table), headroom


def module_by_module(table: LayerTable) -> LayerTable:
    """Split layers: one for each module of each geometry, counted as often as it is called."""
    return LayerTable(table.source, tuple(apart for layer in table.layers for apart in _apart(layer)))


def _apart(layer: Layer) -> Iterator[Layer]:
    calls = Counter(layer.names)
    for name, count in calls.items():
        yield replace(layer, names=(name,), count=count)
