"""Times inference of a model with torch's convolutions, with mucudnn's, and with mucudnn's and cached filters.

The three models share their parameters, and run in turns. First the models run whole. Then, in rounds of its own, each
convolution module runs by itself, on random numbers of the shape that it is called with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import mucudnn
from mucudnn.bench.contests.timing import Contestant, time_in_turns
from mucudnn.bench.suites.inference.result import InferenceBenchmark, LayerResult, Variants
from mucudnn.bench.suites.inference.stored import InferenceFolder
from mucudnn.measuring.timing.timer import Clock, WallClock
from mucudnn.running.environment import current_environment
from mucudnn.running.filter_cache import FilterCache
from mucudnn.tuning.cached_filters import cache_filters
from mucudnn.tuning.result import tuned_of
from mucudnn.words.config import Config
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import Operation
from mucudnn.words.progress import Progress, share_of, silent

ROUNDS = 25


def benchmark_inference(
    model: nn.Module,
    x: Tensor | tuple[Tensor, ...],
    config: Config | None = None,
    *,
    name: str = "model",
    rounds: int = ROUNDS,
    clock: Clock | None = None,
    progress: Progress | None = None,
    kept: InferenceFolder | None = None,
) -> InferenceBenchmark:
    """Tune the forward convolutions of a copy of ``model``, decide which filters to cache, and time its calls.

    x: (N, C, H, W), in the memory format to be measured; or a tuple of all arguments, x the first. config: its
    operations do not count; without a config there is no workspace limit, and no bound on the cache. rounds: samples of
    every variant. clock: clock of the measuring (not of the tuning). progress: as for ``tune``. kept: where
    times are kept, and found that an earlier run measured.

    Raises what ``optimize`` raises, and ``UnavailableError`` where x is not on the CPU.
    """
    arguments = x if isinstance(x, tuple) else (x,)
    x = arguments[0]
    if x.device.type != FilterCache.device_type:
        raise UnavailableError(
            f"x is on {x.device}, and filters are kept on the CPU alone, so that there is nothing to compare: move the "
            "model and x there"
        )
    config = replace(config or Config(workspace_limit=None, cache_budget=None), operations=(Operation.FORWARD,))
    report = progress or silent
    models = _three_models(model, arguments, config, share_of(report, 0.0, 0.5))
    report("the whole model", 0.5)
    clock = clock or WallClock()

    def measured(layer: str | None, measure: Callable[[], Variants]) -> Variants:
        known = None if kept is None else kept.variants(layer)
        found = known or measure()
        if kept is not None and known is None:
            kept.add_variants(layer, found)
        return found

    whole = measured(None, lambda: _measure([_call(one, arguments) for one in models], rounds, clock))
    layers = []
    shapes = _input_shapes(models[0], arguments)
    for index, (layer, shape) in enumerate(shapes.items()):
        report(layer, 0.5 + (index + 1) / (len(shapes) + 1) / 2)
        modules = [one.get_submodule(layer) for one in models]
        samples = _random_like(x, shape)
        calls = [_call(module, (samples,)) for module in modules]
        variants = measured(layer, partial(_measure, calls, rounds, clock))
        layers.append(_layer_result(layer, modules, len(samples), variants))
    return InferenceBenchmark(name, tuple(x.shape), config, current_environment(), whole, tuple(layers), rounds)


def _three_models(
    model: nn.Module, arguments: tuple[Tensor, ...], config: Config, progress: Progress
) -> list[nn.Module]:
    """Models with torch's convolutions, with ours, and with ours and cached filters, in ``eval()``, with shared
    parameters.
    """
    own = copy.deepcopy(model).eval()
    kept = mucudnn.optimize(_sharing(own), arguments, config, progress=progress)
    unkept = _sharing(kept)
    cache_filters(unkept, replace(config, cache_budget=0))
    return [own, unkept, kept]


def _sharing(model: nn.Module) -> nn.Module:
    """Copy a model, but share its parameters and buffers."""
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return copied


def _input_shapes(model: nn.Module, arguments: tuple[Tensor, ...]) -> Mapping[str, tuple[int, ...]]:
    """Input shape (N, C, H, W) of every convolution module, in the order of their first calls."""
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


def _layer_result(name: str, modules: Sequence[nn.Module], batch_size: int, variants: Variants) -> LayerResult:
    _, unkept, kept = modules
    assert isinstance(unkept, mucudnn.Conv2d)
    assert isinstance(kept, mucudnn.Conv2d)
    tuned = next(tuned for tuned in tuned_of(unkept) if tuned.batch_size == batch_size)
    return LayerResult(
        name=name,
        variants=variants,
        filter_bytes=kept.weight.nbytes,
        tuned=tuned,
        kept=next((one for one in kept.cached_filters if one.problem == tuned.problem), None),
    )


def _call(module: nn.Module, arguments: tuple[Tensor, ...]) -> Callable[[], object]:
    @torch.no_grad()
    def call() -> object:
        return module(*arguments)

    return call


def _measure(calls: Sequence[Callable[[], object]], rounds: int, clock: Clock) -> Variants:
    return Variants(*time_in_turns([*map(Contestant, calls)], rounds, clock))
