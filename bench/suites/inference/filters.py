"""Times of inference with torch's convolutions and with mucudnn's, with and without cached filters, interleaved.

The three models share their parameters. The whole models are timed first, then each convolution module alone, on
random numbers of its input shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import mucudnn
from mucudnn.bench.contests.timing import Contestant, time_in_turns
from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.suites.inference.report import FILTERS, KEPT, NOT_KEPT, WHOLE, InferenceRun
from mucudnn.running.filter_cache import FilterCache
from mucudnn.tuning.cached_filters import cache_filters
from mucudnn.tuning.result import tuned_of
from mucudnn.words.config import Config
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import Operation
from mucudnn.words.progress import Progress, share_of, silent


def benchmark_filters(
    run: InferenceRun, model: nn.Module, arguments: tuple[Tensor, ...], config: Config, progress: Progress = silent
) -> None:
    """Tune a copy of ``model`` for inference, decide which filters to cache, and time the model's calls.

    Only forward convolutions are tuned. arguments: all arguments of the model, first x (N, C, H, W) in the memory
    format to measure. config: its operations are ignored. Rows that the folder already has are not measured again.

    Raises the errors of ``optimize``, and ``UnavailableError`` if x is not on the CPU.
    """
    x = arguments[0]
    if x.device.type != FilterCache.device_type:
        raise UnavailableError(
            f"x is on {x.device}, but filters are cached only on the CPU, so that there is nothing to compare: move "
            "the model and x to the CPU"
        )
    config = replace(config, operations=(Operation.FORWARD,))
    own = copy.deepcopy(model).eval()
    shapes = _input_shapes(own, arguments)
    left = [layer for layer in (WHOLE, *shapes) if not run.is_known(FILTERS, layer)]
    if not left:
        return
    models = [own, *_tuned_models(own, arguments, config, share_of(progress, 0.0, 0.5))]
    for index, layer in enumerate(left):
        progress(layer, 0.5 + index / len(left) / 2)
        modules, inputs, more = models, arguments, dict[str, Any]()
        if layer != WHOLE:
            modules, inputs = [one.get_submodule(layer) for one in models], (_random_like(x, shapes[layer]),)
            more = _of_layer(modules, shapes[layer][0])
        times = time_in_turns([Contestant(_call(one, inputs)) for one in modules], run.rounds, run.clock)
        subject = run.subject(FILTERS, layer)
        run.folder.add(
            [
                Row(subject, name, samples_s, configuration=more.get(name), more=more.get("more", {}))
                for name, samples_s in zip((TORCH, NOT_KEPT, KEPT), times, strict=True)
            ]
        )


def _tuned_models(
    own: nn.Module, arguments: tuple[Tensor, ...], config: Config, progress: Progress
) -> tuple[nn.Module, nn.Module]:
    """Return models with mucudnn's convolutions and the parameters of ``own``, without and with cached filters."""
    kept = mucudnn.optimize(_sharing(own), arguments, config, progress=progress)
    unkept = _sharing(kept)
    cache_filters(unkept, replace(config, cache_budget=0))
    return unkept, kept


def _sharing(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares the original's parameters and buffers."""
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return copied


def _input_shapes(model: nn.Module, arguments: tuple[Tensor, ...]) -> Mapping[str, tuple[int, ...]]:
    """Return the input shape (N, C, H, W) of each convolution module by name, in the order of their first calls."""
    names = {module: name for name, module in model.named_modules() if type(module) is nn.Conv2d}
    shapes: dict[str, tuple[int, ...]] = {}

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module in names:
            shapes.setdefault(names[module], inputs[0].shape)

    with register_module_forward_pre_hook(record), torch.no_grad():
        model(*arguments)
    return shapes


def _random_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    torch_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.randn(shape, dtype=x.dtype).contiguous(memory_format=torch_format)


def _of_layer(modules: Sequence[nn.Module], batch_size: int) -> dict[str, Any]:
    """Return the columns of a layer: its configurations with and without cached filters, and the filters' bytes."""
    _, unkept, kept = modules
    assert isinstance(unkept, mucudnn.Conv2d)
    assert isinstance(kept, mucudnn.Conv2d)
    tuned = next(tuned for tuned in tuned_of(unkept) if tuned.batch_size == batch_size)
    cached = next((one for one in kept.cached_filters if one.problem == tuned.problem), None)
    not_kept = str(tuned.configuration)
    return {
        NOT_KEPT: not_kept,
        KEPT: not_kept if cached is None else str(cached.configurations[batch_size]),
        "more": {
            "problem": str(tuned.problem),
            "filter_bytes": kept.weight.nbytes,
            "kept_bytes": 0 if cached is None else cached.prepared_bytes,
        },
    }


def _call(module: nn.Module, arguments: tuple[Tensor, ...]) -> Callable[[], object]:
    @torch.no_grad()
    def call() -> object:
        return module(*arguments)

    return call
