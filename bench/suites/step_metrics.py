"""Errors of a network's training step, by torch and by mucudnn under error bounds, against the same step in float64.

All steps have the same parameters, images and random numbers. Dropout is switched off, because its mask depends on the
dtype. There is no optimizer, because only the gradients are compared.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import mucudnn
from mucudnn.bench.results.reading import Header, ResultFolder, Subject
from mucudnn.bench.results.variants import TORCH
from mucudnn.bench.results.writing import Row, config_record, write_missing
from mucudnn.bench.sources.models import in_format
from mucudnn.bench.sources.trainee import Batch, Loss, labelled_batches
from mucudnn.core.config import Config
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.tables import Table, new_table, ratio
from mucudnn.core.terminal import Progress, silent
from mucudnn.kernels.memory import format_of
from mucudnn.kernels.torch_convolution import relative_l2_error
from mucudnn.running.environment import current_environment
from mucudnn.running.modules import TunedModule

_ROUNDING = 1e-9  # A smaller gradient, as a share of the largest of its module, is zero but for rounding.


def benchmark_step(
    network: str,
    model: nn.Module,
    input_shape: tuple[int, ...],
    out: Path,
    *,
    batch_size: int,
    config: Config,
    error_bounds: Sequence[float],
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    device: str = "cpu",
    loss: Loss = F.cross_entropy,
    progress: Progress = silent,
) -> None:
    """Compare training steps of ``model`` with float64; write rows of errors into the folder ``out``.

    A folder that has the rows is left as it is. model: left unchanged; its first argument is x: (N, *input_shape).
    error_bounds: values of ``max_relative_error``, with a row for each. dtype, memory_format: of all steps but the
    exact one. loss: of images with labels from ten classes.

    Raises the errors of ``open_folder``, ``optimize`` and the model.
    """
    settings = {**config_record(config), "max_relative_error": list(error_bounds)}
    # Confirmation could restore torch's own convolutions, but everything that tuning chose is to be compared.
    configs = {f"mucudnn {bound:g}": replace(config, max_relative_error=bound, confirm=False) for bound in error_bounds}
    variants: dict[str, Config | None] = {TORCH: None, **configs}

    def rows(subject: Subject, progress: Progress) -> Iterator[Row]:
        progress("float64", 0.0)
        ((images, labels),) = labelled_batches(1, batch_size, input_shape)
        batch = images.to(device), labels.to(device)
        own = copy.deepcopy(model).to(device).train()
        for module in own.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        exact = _step(own, batch, loss, torch.float64, MemoryFormat.CONTIGUOUS)
        for number, (name, chosen) in enumerate(variants.items(), start=1):
            progress(name, number / (len(variants) + 1))
            found = _step(own, batch, loss, getattr(torch, dtype), memory_format, chosen)
            yield _compared(Row(subject, name), found, exact)

    columns = ("network", "batch_size", "dtype", "memory_format")
    header = Header(*("metrics", network, settings, current_environment(device)), columns, wanted=1, is_timed=False)
    write_missing(out, header, {(network, batch_size, dtype, str(memory_format)): rows}, progress)


@dataclass(frozen=True)
class _Step:
    """The results of one training step. output: all outputs of the model, flattened and concatenated."""

    output: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    model: nn.Module


def _step(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    dtype: torch.dtype,
    memory_format: MemoryFormat,
    config: Config | None = None,
) -> _Step:
    """Run one training step of a copy of the model in this dtype and memory format; return its results.

    config: of mucudnn's convolutions; None for torch's.
    """
    own = in_format(copy.deepcopy(model).to(dtype=dtype), memory_format)
    images, labels = batch[0].to(dtype=dtype, memory_format=format_of(memory_format, batch[0].dim())), batch[1]
    if config is not None:
        own = mucudnn.optimize(own, images, config, progress=False)
    torch.manual_seed(0)
    with _DrawnInFloat32():
        output = own(images)
        found = loss(output, labels)
    found.backward()  # type: ignore[no-untyped-call]
    values = torch.cat([y.detach().flatten() for y in tree_leaves(output) if isinstance(y, Tensor)])
    gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    return _Step(values, found.detach(), gradients, own)


class _DrawnInFloat32(TorchFunctionMode):
    """A torch mode in which ``randn_like`` draws in float32, so that models get the same numbers in every dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.randn_like:
            return torch.randn(args[0].shape).to(args[0])
        return func(*args, **(kwargs or {}))


def _compared(row: Row, found: _Step, exact: _Step) -> Row:
    """Add the relative L2 errors of the step ``found`` against ``exact``, the step in float64, to a row.

    relative_error: of the gradients of all parameters together. Columns: output: error of all outputs; loss; worst: the
    largest error of one gradient, that of ``worst_parameter``, without gradients that are zero but for rounding, such
    as that of a bias before batch norm; operations: number of tuned operations; ours: how many of these do not run
    PyTorch's convolution; speedup: of all convolutions together, when tuned.
    """
    norms = {name: float(gradient.norm()) for name, gradient in exact.gradients.items()}
    largest: dict[str, float] = defaultdict(float)  # by module
    for name, norm in norms.items():
        module = name.rpartition(".")[0]
        largest[module] = max(largest[module], norm)
    own = {
        name: relative_l2_error(found.gradients[name], gradient)
        for name, gradient in exact.gradients.items()
        if norms[name] > _ROUNDING * largest[name.rpartition(".")[0]]
    }
    worst = max(own, key=lambda name: own[name], default="")
    together = [
        torch.cat([step.gradients[name].double().flatten() for name in exact.gradients]) for step in (found, exact)
    ]
    tuned = [of for module in found.model.modules() if isinstance(module, TunedModule) for of in module.tuned]
    timed = [of for of in tuned if of.baseline_s is not None]
    more = {
        "output": relative_l2_error(found.output, exact.output),
        "loss": relative_l2_error(found.loss, exact.loss),
        "worst": own.get(worst, 0.0),
        "worst_parameter": worst,
        "operations": len(tuned),
        "ours": sum(not of.configuration.is_baseline for of in tuned),
        "speedup": sum(of.baseline_s or 0.0 for of in timed) / sum(of.time_s for of in timed) if timed else None,
    }
    return replace(row, relative_error=relative_l2_error(*together), more=more)


def step_tables(folder: ResultFolder) -> Iterator[Table]:
    """Yield a table of errors against float64, with a line for each variant of the step."""
    row = folder.lines[0]
    printed = new_table(
        f"{row['network']}, batch {row['batch_size']}, {row['memory_format']}: one training step in {row['dtype']} "
        "against float64",
        ("variant", "worst parameter"),
        ["output", "loss", "gradients", "worst", "ours", "speedup"],
    )
    for row in folder.lines:
        errors = (row[name] for name in ("output", "loss", "relative_error", "worst"))
        texts = ("not finite" if error is None else f"{error:.1e}" for error in errors)
        ours = f"{row['ours']} of {row['operations']}" if row["operations"] else ""
        printed.add_row(
            row["contestant"], row["worst_parameter"], *texts, ours, ratio(row["speedup"]) if row["speedup"] else ""
        )
    printed.caption = (
        "relative L2 errors: of all outputs, the loss, all gradients together, and the parameter with the largest; "
        "ours: operations that do not run PyTorch's own convolution; speedup: of the convolutions, when tuned"
    )
    yield printed
