"""Errors of a network's training step in float32, by torch and by mucudnn, against the same step in float64.

All steps have the same parameters, images and random numbers. Dropout is switched off, because its mask depends on the
dtype. There is no optimizer, because only the gradients are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import mucudnn
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import write_missing
from mucudnn.bench.report.records import config_record
from mucudnn.bench.report.tables import new_table
from mucudnn.bench.sources.networks.objectives import CLASSIFICATION, Objective
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.kernels.contract.reference import relative_l2_error
from mucudnn.modules.tuned_module import TunedModule
from mucudnn.running.environment import current_environment
from mucudnn.tuning.result import tuned_of
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import Progress, silent

TORCH, MUCUDNN = "torch", "mucudnn"


def benchmark_step_errors(
    network: str,
    model: nn.Module,
    input_shape: tuple[int, int, int],
    out: Path,
    *,
    batch_size: int,
    config: Config,
    error_bounds: Sequence[float],
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat),
    objective: Objective = CLASSIFICATION,
    progress: Progress = silent,
) -> None:
    """Compare training steps of ``model`` with float64; write rows of errors into the folder ``out``.

    Rows that the folder already has are not measured again. model: in float32 on the CPU; left unchanged. Its first
    argument is x: (N, *input_shape). error_bounds: values of ``max_relative_error``, with a row for each. objective:
    the loss, of images with labels from ten classes.

    Raises the errors of ``open_folder``, ``optimize`` and the model.
    """
    settings = {
        "batch_sizes": [batch_size],
        "memory_formats": list(memory_formats),
        **config_record(config),
        "max_relative_error": list(error_bounds),
    }
    columns = ("network", "batch_size", "memory_format")
    environment = current_environment()
    header = Header(*("errors", network, settings, environment), columns, wanted=len(memory_formats), is_timed=False)
    configs = {f"{MUCUDNN} {bound:g}": replace(config, max_relative_error=bound) for bound in error_bounds}
    comparison = _Comparison(model, input_shape, batch_size, configs, objective)
    wanted = {(network, batch_size, str(one)): partial(comparison.rows, one) for one in memory_formats}
    write_missing(out, header, wanted, progress)


@dataclass(frozen=True)
class _Step:
    """The results of one training step. output: all outputs of the model, flattened and concatenated."""

    output: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    model: nn.Module


class _Comparison:
    """A comparison of a model's training steps in float32 with its step in float64, all without dropout."""

    def __init__(
        self,
        model: nn.Module,
        shape: tuple[int, int, int],
        batch_size: int,
        configs: Mapping[str, Config],
        objective: Objective,
    ) -> None:
        self._model, self._objective = copy.deepcopy(model).train(), objective
        for module in self._model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        ((images, labels),) = labelled_batches(1, batch_size, shape)
        self._arguments, self._target = objective.arguments(images), objective.target(images, labels)
        # Confirmation could restore torch's own convolutions, but everything that tuning chose is to be compared.
        self._configs = {name: replace(config, confirm=False) for name, config in configs.items()}
        self._exact = cache(partial(self._step, torch.float64, torch.contiguous_format))

    def rows(self, memory_format: MemoryFormat, subject: Subject, progress: Progress) -> Iterator[Row]:
        """Yield the errors against float64 of a step with torch's convolutions, then with mucudnn's in each config."""
        progress("float64", 0.0)
        exact = self._exact()
        variants = (TORCH, *self._configs)
        for number, variant in enumerate(variants, start=1):
            progress(f"{variant} {memory_format}", number / (len(variants) + 1))
            found = self._step(torch.float32, TORCH_FORMATS[memory_format], self._configs.get(variant))
            yield _compared(Row(subject, variant), found, exact)

    def _step(self, dtype: torch.dtype, memory_format: torch.memory_format, config: Config | None = None) -> _Step:
        """Run one training step of a copy of the model in this dtype and memory format; return its results.

        config: of mucudnn's convolutions; None for torch's.
        """
        own = copy.deepcopy(self._model).to(dtype=dtype, memory_format=memory_format)  # type: ignore[call-overload]
        images, *others = (_in(tensor, dtype) for tensor in self._arguments)
        arguments = (images.contiguous(memory_format=memory_format), *others)
        if config is not None:
            own = mucudnn.optimize(own, arguments, config, progress=False)
        torch.manual_seed(0)
        with _DrawnInFloat32():
            output = own(*arguments)
            loss = self._objective.loss(output, _in(self._target, dtype))
        loss.backward()  # type: ignore[no-untyped-call]
        values = torch.cat([y.detach().flatten() for y in tree_leaves(output) if isinstance(y, Tensor)])
        gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
        return _Step(values, loss.detach(), gradients, own)


class _DrawnInFloat32(TorchFunctionMode):
    """A torch mode in which ``randn_like`` draws in float32, so that models get the same numbers in every dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.randn_like:
            return torch.randn(args[0].shape).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the tensor to this dtype; return integer tensors, such as labels or diffusion times, unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _compared(row: Row, found: _Step, exact: _Step) -> Row:
    """Add the relative L2 errors of the step ``found`` against ``exact``, the step in float64, to a row.

    relative_error: of the gradients of all parameters together. Columns: output: error of all outputs; loss; worst: the
    largest error of one gradient, that of ``worst_parameter``; operations: number of tuned operations; ours: how many
    of these operations do not run PyTorch's convolution; speedup: of all convolutions together, when tuned.
    """
    own = {name: relative_l2_error(gradient, exact.gradients[name]) for name, gradient in found.gradients.items()}
    worst = max(own, key=lambda name: own[name])
    together = [
        torch.cat([step.gradients[name].double().flatten() for name in exact.gradients]) for step in (found, exact)
    ]
    tuned = [of for module in found.model.modules() if isinstance(module, TunedModule) for of in tuned_of(module)]
    timed = [of for of in tuned if of.baseline_s is not None]
    more = {
        "output": relative_l2_error(found.output, exact.output),
        "loss": relative_l2_error(found.loss, exact.loss),
        "worst": own[worst],
        "worst_parameter": worst,
        "operations": len(tuned),
        "ours": sum(not of.configuration.is_baseline for of in tuned),
        "speedup": sum(of.baseline_s or 0.0 for of in timed) / sum(of.time_s for of in timed) if timed else None,
    }
    return replace(row, relative_error=relative_l2_error(*together), more=more)


def errors_tables(folder: ResultFolder) -> Iterator[Table]:
    """Yield a table of errors against float64, with a line for each variant of the step and each memory format."""
    (batch_size,) = folder.header.settings["batch_sizes"]
    printed = new_table(
        f"{folder.header.source}, batch {batch_size}: one training step in float32 against float64",
        ("variant", "memory format", "worst parameter"),
        ["output", "loss", "gradients", "worst", "ours", "speedup"],
    )
    for row in folder.lines:
        errors = (row[name] for name in ("output", "loss", "relative_error", "worst"))
        texts = ("not finite" if error is None else f"{error:.1e}" for error in errors)
        ours = f"{row['ours']} of {row['operations']}" if row["operations"] else ""
        speedup = f"{row['speedup']:.2f}×" if row.get("speedup") else ""
        printed.add_row(row["contestant"], row["memory_format"], row["worst_parameter"], *texts, ours, speedup)
    printed.caption = (
        "relative L2 errors: of all outputs, the loss, all gradients together, and the parameter with the largest; "
        "ours: operations that do not run PyTorch's own convolution; speedup: of the convolutions, when tuned"
    )
    yield printed
