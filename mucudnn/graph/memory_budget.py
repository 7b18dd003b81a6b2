"""Models that run as graphs: within a memory budget, fused, and with the same bits in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, warn
from mucudnn.core.terminal import Progress
from mucudnn.graph.batch_invariant import fit_invariant
from mucudnn.graph.capture import NotCapturedError
from mucudnn.graph.fitting import fit
from mucudnn.graph.model import BandedModel, Graphs, banded, signature_of
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.dispatcher import untouched
from mucudnn.tuning.model_state import is_training, undisturbed


def fit_in_memory(model: nn.Module, sample_inputs: Sequence[Any], config: Config, progress: Progress) -> nn.Module:
    """Return a module that computes what the model computes within ``config.memory_budget``, for these inputs.

    Returns the model itself, with a warning, if its graph cannot be captured or computes something else.

    Raises ``InfeasibleError`` with the smallest budget that would do, ``InvalidInputError`` for a model in training
    mode, and the errors of ``tune``.
    """
    require_inference(model, "memory_budget")
    try:
        return _banded(model, sample_inputs, config, progress)
    except NotCapturedError as error:
        warn(f"the model runs as it is, without a memory budget: {error}")
        return model


def run_as_graph(
    model: nn.Module, sample_input: Any, config: Config, progress: Progress, why_not: str | None = None
) -> BandedModel | None:
    """Return a module that computes what the model computes, faster, for inputs of this shape on the CPU.

    Returns None if that is not faster; also, with a warning, if the model's graph cannot be captured or computes
    something else, for a model on another device, and if ``why_not`` says why it may not run as a graph.

    Raises ``InvalidInputError`` for a model in training mode, and the errors of ``tune``.
    """
    require_inference(model, "fuse")
    if (device := device_of_convolutions(model)).type != "cpu":
        why_not = f"it is on {device}"
    try:
        if why_not is not None:
            raise NotCapturedError(why_not)
        made = _banded(model, [sample_input], config, progress)
    except NotCapturedError as error:
        warn(f"the model is tuned, but does not run as a graph: {error}")
        return None
    return None if made.tuned_graphs.findings[0].runs_torchs else made


def require_inference(model: nn.Module, setting: str) -> None:
    """Raise ``InvalidInputError`` if a part of the model is in training mode. setting: the name of what needs it."""
    for name, module in model.named_modules():
        if is_training(module):
            raise InvalidInputError(
                f"{setting} is for inference, and {name or 'the model'} is in training mode: call model.eval() before, "
                f"or leave {setting} out"
            )


def _banded(model: nn.Module, sample_inputs: Sequence[Any], config: Config, progress: Progress) -> BandedModel:
    try:
        banded(Graphs(model, {}, are_valid=False))
    except (TypeError, ValueError) as error:
        raise NotCapturedError(str(error)) from error
    inputs = [sample if isinstance(sample, tuple) else (sample,) for sample in sample_inputs]
    with undisturbed(model), untouched:
        if config.batch_invariant:
            fitted = [pair for arguments in inputs for pair in fit_invariant(model, arguments, config, progress)]
        else:
            fitted = [(arguments, fit(model, arguments, config, progress)) for arguments in inputs]
    schedules = {signature_of(arguments): None if one.runs_torchs else one.schedule for arguments, one in fitted}
    return banded(Graphs(model, schedules, [one for _, one in fitted], batch_invariant=config.batch_invariant))
