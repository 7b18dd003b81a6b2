"""Errors of convolutions against float64: of one layer's operations by each algorithm, or of a network's training step.

A layer's configuration is called through a PyTorch module, as in training. All steps have the same parameters, images
and random numbers. Dropout is switched off, because its mask depends on the dtype. There is no optimizer, because only
the gradients are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import mucudnn
from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.results.columns import Columns, table_of
from mucudnn.bench.results.reading import PROBLEM_COLUMNS, Header, Line, ResultFolder, Subject, problem_columns
from mucudnn.bench.results.variants import TORCH
from mucudnn.bench.results.writing import Row, config_record, write_missing
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.sources.models import in_format
from mucudnn.bench.sources.trainee import Workload, placed
from mucudnn.bench.suites.shared.layer_calls import (
    PASSED,
    cut_down,
    distinct_results,
    error_norms,
    gradcheck,
    module_of,
    through_module,
)
from mucudnn.bench.suites.shared.timing import failed, time_in_turns, with_samples
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.core.tables import Table, milliseconds, new_table, ratio
from mucudnn.core.terminal import Progress, silent
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_bytes, grouped
from mucudnn.kernels.algorithm import why_unsupported
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.measuring.candidates import Candidate, find_candidates
from mucudnn.measuring.operands import random_operands
from mucudnn.measuring.turns import Rounds, Timer
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.devices import current_environment
from mucudnn.running.modules import TunedModule
from mucudnn.testing.checks import IMAGE, dependent, spoil, threads
from mucudnn.tuning.job import permitted_algorithms

ROUNDS = 15
RUNS = 5  # results that are compared bit by bit
# Short calls are sampled for SHORT_S seconds, which reduces the noise to a few percent.
_MOST_ROUNDS, _SHORT_S = 41, 0.2
_LIMIT_S = 3.0  # for each call: some algorithms are a hundred times slower
_FEW = 2  # samples of a gradcheck
_ROUNDING = 1e-9  # A smaller gradient, as a share of the largest of its module, is zero but for rounding.

_Variants = Mapping[str, tuple[Configuration, Sequence[Candidate]]]  # by contestant, with a candidate for each part
_StepResult = tuple[nn.Module, Tensor, Tensor]  # the model, which has the gradients; its outputs; the loss

# One layer


def benchmark_layer(
    source: str,
    layer: Layer,
    config: Config,
    out: Path,
    *,
    configurations: Sequence[Configuration] = (),
    rounds: int = ROUNDS,
    machine: Machine,
    progress: Progress = silent,
) -> None:
    """Measure accuracy and time of a layer's operations; write rows into ``out``, skipping operations it already has.

    config: the operations, and the algorithms, which are all if it names none, but none if configurations are given.
    Torch's own algorithm is always measured.
    configurations: of the whole mini-batch, measured like algorithms.
    rounds: time samples of each call; short calls get more.

    Raises the errors of ``open_folder``, and ``InvalidInputError`` for unknown algorithms and configurations of other
    batch sizes. On ``KeyboardInterrupt``, everything measured so far is in the folder.
    """
    n, algorithms = layer.batch_size, config.algorithms
    for configuration in configurations:
        if configuration.batch_size != n:
            raise InvalidInputError(
                f"configuration '{configuration}' has {configuration.batch_size} samples, and the layer {n}: give one "
                f"of {n} samples, or another batch size"
            )
    # Find what can be measured of each operation.
    permitted = Config(algorithms=(TORCHS_OWN,) if algorithms is None and configurations else algorithms)
    wanted, left_out = {}, []
    for operation in config.operations:
        problem = layer.problem.with_operation(operation)
        names = [algorithm.name for algorithm in permitted_algorithms(machine, permitted, problem, [n])]
        asked = {TORCH if name == TORCHS_OWN else name: _of(MicroConfig(name, n)) for name in names}
        asked |= {str(configuration): configuration for configuration in configurations}
        variants, reasons = _variants(asked, problem, n, machine)
        left_out += [(f"{layer.name}, {problem}: {name}", reason) for name, reason in reasons.items()]
        subject = layer.name, *problem_columns(problem, n).values()
        wanted[subject] = partial(_layer_rows, variants, problem, n, rounds, machine)
    header = Header(
        "metrics",
        source,
        {
            "layer": layer.name,
            "batch_size": n,
            "dtype": layer.problem.dtype,
            "memory_format": str(layer.problem.memory_format),
            "operations": [str(operation) for operation in config.operations],
            "algorithms": None if algorithms is None else list(algorithms),
            "configurations": list(map(str, configurations)),
            "rounds": rounds,
            "runs": RUNS,
        },
        machine.environment,
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=len(config.operations),
        limits={layer.problem.dtype: MachineLimits.measured(machine.device, layer.problem.dtype)},
    )
    write_missing(out, header, wanted, progress, machine.watch, left_out)


def _variants(
    asked: Mapping[str, Configuration], problem: ConvProblem, n: int, machine: Machine
) -> tuple[_Variants, dict[str, str]]:
    """Return the configurations that can be measured, with their candidates, and the reasons why others cannot.

    Raises ``InvalidInputError`` for unknown algorithms.
    """
    parts = {part for configuration in asked.values() for part in configuration.micro_configs}
    sizes = sorted({part.micro_batch_size for part in parts})
    config = Config(algorithms=tuple(sorted({part.algorithm for part in parts})))
    proofs = machine.proofs(n)
    algorithms = permitted_algorithms(machine, config, problem, sizes)
    candidates, refused = find_candidates(problem, algorithms, sizes, proofs=proofs)
    offered = {candidate.micro_config: candidate for candidate in candidates if candidate.micro_config in parts}
    if proofs is not None:
        proofs.ask(offered.values())  # all at once
    failures = {failure.micro_config: failure.reason for failure in refused}
    variants, reasons = {}, {}
    for name, configuration in asked.items():
        distinct = dict.fromkeys(configuration.micro_configs)
        missing = next((part for part in distinct if part not in offered), None)
        if missing is None:
            variants[name] = configuration, [offered[part] for part in distinct]
        else:
            reasons[name] = (
                failures.get(missing)
                or failures.get(MicroConfig(missing.algorithm, n))
                or f"{missing.algorithm} is not offered for {missing.micro_batch_size} samples"
            )
    return variants, reasons


def _layer_rows(
    variants: _Variants,
    problem: ConvProblem,
    n: int,
    rounds: int,
    machine: Machine,
    subject: Subject,
    progress: Progress,
) -> list[Row]:
    """Return a row for each variant, with its metrics and its times, interleaved, or the reason for a failure."""
    # What the results are compared with, and an image with NaN.
    operands = random_operands(problem, n, machine.device)
    expected = reference(problem, operands.x, operands.w, operands.y)
    image = IMAGE[problem.operation]
    spoilt = replace(operands, **{image: getattr(operands, image).clone()})
    spoil(getattr(spoilt, image))
    reached = int(dependent(problem, image, n).sum())
    # The metrics of each variant.
    rule = replace(machine.clock.every_round, time_limit_s=_LIMIT_S, max_calls=1)  # emptying caches takes longer
    entries: list[tuple[Row, Timer]] = []
    for done, (name, (configuration, candidates)) in enumerate(variants.items()):
        progress(f"{subject['layer']}, {problem}: errors and gradients of {name}", done / (len(variants) + 1))
        row = Row(subject, name, configuration=str(configuration))
        try:
            prepared = {part.algorithm.name: part.workspace.prepared_bytes for part in candidates}
            scratch_bytes = max(part.count_scratch_bytes() for part in candidates)
            row = replace(row, workspace_bytes=sum(prepared.values()) + scratch_bytes)
            call = through_module(configuration, problem, operands)
            first = call().detach()
            more = {
                **error_norms(first, expected),
                "gradcheck": _gradcheck(configuration, candidates, problem, machine.device),
                "runs": RUNS,
                "distinct_results": distinct_results(chain([first], (call().detach() for _ in range(RUNS - 1)))),
                "not_finite": int((~through_module(configuration, problem, spoilt)().isfinite()).sum()),
                "not_finite_by_definition": reached,
                "local": all(part.algorithm.is_local(problem) for part in candidates),
            }
        except tuple(error for part in candidates for error in part.errors) as error:
            entries.append((row, failed(error)))
        else:
            row = replace(row, relative_error=relative_l2_error(first, expected), more=more)
            entries.append((row, Timer(call, machine.clock, rule)))
    # Their times.
    progress(f"{subject['layer']}, {problem}: {rounds} samples of each time, or more", 1 - 1 / (len(variants) + 1))
    count = Rounds(rounds, max(rounds, _MOST_ROUNDS), _SHORT_S)
    time_in_turns([timer for _, timer in entries if timer.stop is None], count)
    return [with_samples(row, timer) for row, timer in entries]


def _gradcheck(configuration: Configuration, candidates: Sequence[Candidate], problem: ConvProblem, device: str) -> str:
    """Check the gradients of the layer cut down, of which this operation is computed by the same algorithms.

    They compute equal shares of about ``_FEW`` samples. Torch computes the other two operations, so that a failed check
    is the algorithms' fault.
    """
    if device != "cpu":
        return "not done: it runs on the CPU"
    names = configuration.algorithms
    parts = [MicroConfig(name, 1) for name in names for _ in range(-(-_FEW // len(names)))]
    few = _of(*(parts if len(configuration.micro_configs) > 1 else [MicroConfig(names[0], _FEW)]))
    reasons = []
    for small in cut_down(problem):
        reason = next(filter(None, (why_unsupported(part.algorithm, small) for part in candidates)), None)
        if reason is None:
            with threads(1):  # it makes thousands of calls of a few sums, for which threads would wait
                w = random_operands(small, few.batch_size).w
                return gradcheck(module_of(few, small, w), small, few.batch_size)
        reasons.append(reason)
    return f"not done: {reasons[0]}"


def _of(*micro_configs: MicroConfig) -> Configuration:
    return Configuration(micro_configs, time_s=0.0, workspace_bytes=0)


# One training step


def benchmark_step(
    network: str,
    workload: Workload,
    config: Config,
    out: Path,
    *,
    error_bounds: Sequence[float],
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    progress: Progress = silent,
) -> None:
    """Compare training steps of a model with float64; write rows of errors into the folder ``out``.

    A folder that has the rows is left as it is.

    workload: the model, which is left unchanged, with a batch on the device to use, and the loss.
    error_bounds: values of ``max_relative_error``, with a row for each.
    dtype: of all steps but the exact one.
    memory_format: of the same.

    Raises the errors of ``open_folder``, ``optimize`` and the model.
    """
    model, (images, labels), loss = workload
    # Confirmation could restore torch's own convolutions, but everything that tuning chose is to be compared.
    configs = {f"mucudnn {bound:g}": replace(config, max_relative_error=bound, confirm=False) for bound in error_bounds}
    variants: dict[str, Config | None] = {TORCH: None, **configs}

    def rows(subject: Subject, progress: Progress) -> Iterator[Row]:
        progress("float64", 0.0)
        trained = copy.deepcopy(model).to(images.device).train()
        for module in trained.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        step = partial(_step, (trained, (images, labels), loss))
        exact = step(torch.float64, MemoryFormat.CONTIGUOUS)
        for number, (name, chosen) in enumerate(variants.items(), start=1):
            progress(name, number / (len(variants) + 1))
            yield _compared(Row(subject, name), step(getattr(torch, dtype), memory_format, chosen), exact)

    subject = {"network": network, "batch_size": len(images), "dtype": dtype, "memory_format": str(memory_format)}
    header = Header(
        "metrics",
        network,
        {**config_record(config), "max_relative_error": list(error_bounds)},
        current_environment(images.device.type),
        subject_columns=tuple(subject),
        wanted=1,
        is_timed=False,
    )
    write_missing(out, header, {tuple(subject.values()): rows}, progress)


def _step(
    workload: Workload, dtype: torch.dtype, memory_format: MemoryFormat, config: Config | None = None
) -> _StepResult:
    """Run one training step of a copy of the model in this dtype and memory format.

    Return the copy, which has the gradients; all its outputs, flattened and concatenated; and the loss.

    config: of mucudnn's convolutions; None for torch's.
    """
    original, batch, loss_of = workload
    model = in_format(copy.deepcopy(original).to(dtype=dtype), memory_format)
    images, labels = placed(batch, batch[0].device, memory_format, dtype)
    if config is not None:
        model = mucudnn.optimize(model, images, config, progress=False)
    torch.manual_seed(0)
    with _DrawnInFloat32():
        output = model(images)
        loss = loss_of(output, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    values = torch.cat([y.detach().flatten() for y in tree_leaves(output) if isinstance(y, Tensor)])
    return model, values, loss.detach()


class _DrawnInFloat32(TorchFunctionMode):
    """A torch mode in which ``randn_like`` draws in float32, so that models get the same numbers in every dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.randn_like:
            return torch.randn(args[0].shape).to(args[0])
        return func(*args, **(kwargs or {}))


def _compared(row: Row, result: _StepResult, exact: _StepResult) -> Row:
    """Add the relative L2 errors of the result of a step against ``exact``, that of the step in float64, to a row.

    relative_error: of the gradients of all parameters together. Further columns:

    output: error of all outputs.
    loss: that of the loss.
    worst: the largest error of one gradient, that of ``worst_parameter``, without gradients that are zero but for
    rounding, such as that of a bias before batch norm.
    operations: number of tuned operations.
    ours: how many of these do not run PyTorch's convolution.
    speedup: of all convolutions together, when tuned.
    """
    (model, output, loss), (exact_model, exact_output, exact_loss) = result, exact
    gradients, expected = (
        {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        for network in (model, exact_model)
    )
    errors: dict[str, float] = {}
    for _, names in groupby(expected, key=lambda name: name.rpartition(".")[0]):  # of one module
        norms = {name: float(expected[name].norm()) for name in names}
        counted = [name for name, norm in norms.items() if norm > _ROUNDING * max(norms.values())]
        errors |= {name: relative_l2_error(gradients[name], expected[name]) for name in counted}
    worst = max(errors, key=errors.__getitem__, default="")
    together = (torch.cat([tensors[name].double().flatten() for name in expected]) for tensors in (gradients, expected))
    tuned = [choice for module in model.modules() if isinstance(module, TunedModule) for choice in module.tuned]
    timed = [choice for choice in tuned if choice.baseline_s is not None]
    torch_s, our_s = sum(choice.baseline_s or 0.0 for choice in timed), sum(choice.time_s for choice in timed)
    more = {
        "output": relative_l2_error(output, exact_output),
        "loss": relative_l2_error(loss, exact_loss),
        "worst": errors.get(worst, 0.0),
        "worst_parameter": worst,
        "operations": len(tuned),
        "ours": sum(not choice.configuration.is_baseline for choice in tuned),
        "speedup": torch_s / our_s if timed else None,
    }
    return replace(row, relative_error=relative_l2_error(*together), more=more)


# Tables


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


# The text of each column of a row, by its title.
_OF_LAYER: Columns[Line] = {
    "relative": lambda row: _error(row["relative_error"]),
    "L1": lambda row: _error(row["error_l1"]),
    "L2": lambda row: _error(row["error_l2"]),
    "maximum": lambda row: _error(row["error_max"]),
    "gradcheck": lambda row: row["gradcheck"].partition(":")[0],
    "results": lambda row: f"{row['distinct_results']} of {row['runs']}",
    "by definition": lambda row: f"{row['not_finite_by_definition']:,}",
    "not finite": lambda row: f"{row['not_finite']:,}",
    "strict": lambda row: "yes" if row["local"] else "no",
    "ms": lambda row: milliseconds(median(row["samples_s"])),
    "workspace": lambda row: format_bytes(row["workspace_bytes"]),
}
_OF_STEP: Columns[Line] = {
    "output": lambda row: _error(row["output"]),
    "loss": lambda row: _error(row["loss"]),
    "gradients": lambda row: _error(row["relative_error"]),
    "worst": lambda row: _error(row["worst"]),
    "ours": lambda row: f"{row['ours']} of {row['operations']}" if row["operations"] else "",
    "speedup": lambda row: ratio(row["speedup"]) if row["speedup"] else "",
}
_LEGEND = (
    "relative, L1, L2, maximum: norms of the error against float64; relative: L2 over that of the result",
    "gradcheck: PyTorch's, in float64, of the layer cut down to few channels",
    f"results: number of results that differ in any bit, of {RUNS} runs; 1: repeatable",
    "not finite: results where a few pixels of x (backward data: dy) are NaN or infinite; by definition, and as "
    "computed; strict: whether --strict allows it",
    "ms: median of a call through a module, as in training",
)


def layer_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table with a row for each operation and contestant, and a text that explains columns and gaps."""
    header = folder.header
    printed = new_table(f"{header.source}, {header.settings['layer']}", ("operation", "algorithm"), tuple(_OF_LAYER))
    unusual = [(reason, name.rpartition(": ")[2]) for reason, names in folder.left_out.items() for name in names]
    for operation, rows in groupby(folder.lines, key=lambda row: str(row["operation"])):
        printed.add_row()
        for index, row in enumerate(rows):
            cells = [row["failure"]] if row["failure"] else [text(row) for text in _OF_LAYER.values()]
            printed.add_row("" if index else operation, row["contestant"], *cells)
            if row.get("gradcheck", PASSED) != PASSED:
                unusual.append((f"gradcheck {row['gradcheck']}", row["contestant"]))
    yield printed
    notes = (f"{', '.join(names)}: {reason}" for reason, names in grouped(dict.fromkeys(unusual)).items())
    yield "\n".join((*_LEGEND, *notes, *folder.problems))


def step_tables(folder: ResultFolder) -> Iterator[Table]:
    """Yield a table of errors against float64, with a line for each variant of the step."""
    network, batch_size, dtype, memory_format = (folder.lines[0][name] for name in folder.header.subject_columns)
    yield table_of(
        folder.lines,
        f"{network}, batch {batch_size}, {memory_format}: one training step in {dtype} against float64",
        {"variant": itemgetter("contestant"), "worst parameter": itemgetter("worst_parameter")},
        _OF_STEP,
        caption="relative L2 errors: of all outputs, the loss, all gradients together, and the parameter with the "
        "largest; ours: operations that do not run PyTorch's own convolution; speedup: of the convolutions, when tuned",
    )
