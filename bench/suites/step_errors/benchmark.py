"""Computes one training step of a network in float64, and in float32 by torch and by mucudnn, and compares them.

All steps have the same parameters, images and random draws. Dropout is switched off: what it drops depends on the
dtype. There is no optimizer: gradients are what a step is for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import mucudnn
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import FolderWriter, folder_if_named
from mucudnn.bench.report.records import config_record
from mucudnn.bench.sources.networks.objectives import CLASSIFICATION, Objective
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites.step_errors.result import StepErrors, StepErrorsBenchmark
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.kernels.contract.reference import relative_l2_error
from mucudnn.modules.tuned_module import TunedModule
from mucudnn.running.environment import Environment, current_environment
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import Progress, silent

_INNER = ("variant", "memory_format", "gradients")
Wanted = tuple[str, MemoryFormat]  # variant, and the memory format of its step


def header_of(
    network: str,
    batch_size: int,
    memory_formats: Sequence[MemoryFormat],
    config: Config,
    wanted: int,
    environment: Environment,
) -> Header:
    """Describe a run."""
    settings = {
        "batch_sizes": [batch_size],
        "memory_formats": list(memory_formats),
        **config_record(replace(config, database=None)),
    }
    return Header(
        *("errors", network, settings, environment),
        subject_columns=("network", "batch_size", "memory_format"),
        wanted=wanted,
        is_timed=False,
    )


def row_of(network: str, batch_size: int, errors: StepErrors) -> Row:
    """Return the row of a variant; its relative error is that of all gradients together."""
    more = {name: value for name, value in asdict(errors).items() if name not in _INNER}
    subject = _subject(network, batch_size, errors.memory_format)
    return Row(subject, errors.variant, relative_error=errors.gradients, more=more)


def known_errors(
    folder: FolderWriter, network: str, batch_size: int, wanted: Iterable[Wanted]
) -> dict[Wanted, StepErrors]:
    """Return what an earlier run found."""
    found = {}
    for variant, memory_format in wanted:
        for line in folder.known(_subject(network, batch_size, memory_format)):
            if line["contestant"] == variant:
                fields = {name: line[name] for name in StepErrors.__dataclass_fields__ if name not in _INNER}
                errors = StepErrors(variant, memory_format, gradients=line["relative_error"], **fields)
                found[variant, memory_format] = errors
    return found


def _subject(network: str, batch_size: int, memory_format: MemoryFormat) -> Subject:
    return {"network": network, "batch_size": batch_size, "memory_format": str(memory_format)}


TORCH, MUCUDNN = "torch", "mucudnn"

_Made = Callable[[nn.Module, tuple[Tensor, ...]], nn.Module]  # of the model and its arguments


def benchmark_step_errors(
    network: str,
    model: nn.Module,
    input_shape: tuple[int, int, int],
    *,
    batch_size: int,
    config: Config | None = None,
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat),
    objective: Objective = CLASSIFICATION,
    progress: Progress = silent,
    out: Path | None = None,
) -> StepErrorsBenchmark:
    """Compare steps of ``model``, which is on the CPU, in float32, and left as it is.

    Its first argument is x: (N, *input_shape). objective: what it is trained for, on images with ten labels.

    out: a result folder, which gets each row; what it has is not computed again.

    Raises what ``open_folder`` and ``optimize`` raise, and whatever the model raises.
    """
    config = config or Config()
    environment = current_environment()
    variants: dict[str, _Made] = {TORCH: _as_torch, MUCUDNN: _Optimized(config)}
    wanted = [(variant, memory_format) for memory_format in memory_formats for variant in variants]
    header = header_of(network, batch_size, memory_formats, config, len(wanted), environment)
    with folder_if_named(out, header) as folder:
        known = {} if folder is None else known_errors(folder, network, batch_size, wanted)
        subject = _Subject.of(model, input_shape, batch_size, objective)
        progress("float64", 0.0)
        exact = subject.step(_as_torch, torch.float64, torch.contiguous_format) if len(known) < len(wanted) else None
        rows = []
        for number, (variant, memory_format) in enumerate(wanted):
            progress(f"{variant} {memory_format}", (1 + number) / (1 + len(wanted)))
            row = known.get((variant, memory_format))
            if row is None and exact is not None:
                found = subject.step(variants[variant], torch.float32, TORCH_FORMATS[memory_format])
                row = _compared(variant, memory_format, found, exact)
                if folder is not None:
                    folder.add([row_of(network, batch_size, row)])
            if row is not None:
                rows.append(row)
        if folder is not None:
            folder.write_summary()
    return StepErrorsBenchmark(network, batch_size, config, environment, tuple(rows))


@dataclass(frozen=True)
class _Step:
    """Results of a step, as they are computed."""

    output: Tensor  # of all outputs, one after the other
    loss: Tensor
    gradients: dict[str, Tensor]
    model: nn.Module


@dataclass(frozen=True)
class _Subject:
    """A model without dropout, all that it is called with, and the target of the loss."""

    model: nn.Module
    arguments: tuple[Tensor, ...]
    target: Tensor
    objective: Objective

    @classmethod
    def of(cls, model: nn.Module, input_shape: tuple[int, int, int], batch_size: int, objective: Objective) -> _Subject:
        own = copy.deepcopy(model).train()
        for module in own.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        ((images, labels),) = labelled_batches(1, batch_size, input_shape)
        return cls(own, objective.arguments(images), objective.target(images, labels), objective)

    def step(
        self,
        made: _Made,
        dtype: torch.dtype,
        memory_format: torch.memory_format,
    ) -> _Step:
        """Compute a step of a copy of the model, in this dtype and memory format, and as it is ``made``."""
        own = copy.deepcopy(self.model).to(dtype=dtype, memory_format=memory_format)  # type: ignore[call-overload]
        images, *others = (_in(tensor, dtype) for tensor in self.arguments)
        arguments = (images.contiguous(memory_format=memory_format), *others)
        own = made(own, arguments)
        torch.manual_seed(0)
        with _DrawnInFloat32():
            output = own(*arguments)
            loss = self.objective.loss(output, _in(self.target, dtype))
        loss.backward()  # type: ignore[no-untyped-call]
        values = torch.cat([y.detach().flatten() for y in tree_leaves(output) if isinstance(y, Tensor)])
        gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
        return _Step(values, loss.detach(), gradients, own)


def _as_torch(model: nn.Module, arguments: tuple[Tensor, ...]) -> nn.Module:
    return model


@dataclass(frozen=True)
class _Optimized:
    """Makes a model one of mucudnn's, with all that was chosen: confirming may put torch's own back."""

    config: Config

    def __call__(self, model: nn.Module, arguments: tuple[Tensor, ...]) -> nn.Module:
        return mucudnn.optimize(model, arguments, replace(self.config, confirm=False))


class _DrawnInFloat32(TorchFunctionMode):
    """Lets models draw the same normal numbers in every dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.randn_like:
            return torch.randn(args[0].shape).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Labels, and times of diffusion, stay whole numbers."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _compared(variant: str, memory_format: MemoryFormat, found: _Step, exact: _Step) -> StepErrors:
    own = {name: relative_l2_error(gradient, exact.gradients[name]) for name, gradient in found.gradients.items()}
    worst = max(own, key=lambda name: own[name])
    together = [
        torch.cat([step.gradients[name].double().flatten() for name in exact.gradients]) for step in (found, exact)
    ]
    tuned = [of.configuration for m in found.model.modules() if isinstance(m, TunedModule) for of in m.tuned]
    return StepErrors(
        variant,
        memory_format,
        output=relative_l2_error(found.output, exact.output),
        loss=relative_l2_error(found.loss, exact.loss),
        gradients=relative_l2_error(*together),
        worst=own[worst],
        worst_parameter=worst,
        operations=len(tuned),
        ours=sum(not configuration.is_baseline for configuration in tuned),
    )
