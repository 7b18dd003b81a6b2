"""Accuracy of a convolution layer's operations against float64: by torch, every algorithm and given configurations.

A configuration is called through a PyTorch module, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.results.reading import PROBLEM_COLUMNS, Header, LeftOut, ResultFolder, Subject, problem_columns
from mucudnn.bench.results.variants import TORCH
from mucudnn.bench.results.writing import Row, write_missing
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.suites.shared.timing import Contestant, try_in_turns
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, LibraryError, first_line
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.core.tables import Table, milliseconds, new_table
from mucudnn.core.terminal import Progress, silent
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_bytes
from mucudnn.kernels.algorithm import why_unsupported
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.measuring.candidates import Candidate, find_candidates
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.turns import Rounds
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.choices import Choices, make_executable
from mucudnn.running.modules import Conv2d, Conv3d, TunedModule
from mucudnn.testing.checks import IMAGE, dependent, spoil, threads
from mucudnn.tuning.job import permitted_algorithms

ROUNDS = 15
RUNS = 5  # results that are compared bit by bit
# Short calls are sampled for SHORT_S seconds, which reduces the noise to a few percent.
_MOST_ROUNDS, _SHORT_S = 41, 0.2
_LIMIT_S = 3.0  # for each call: some algorithms are a hundred times slower
_FEW = 2  # samples of a gradcheck


def benchmark_layer(
    source: str,
    layer: Layer,
    out: Path,
    *,
    operations: Sequence[Operation] = tuple(Operation),
    algorithms: tuple[str, ...] | None = None,
    configurations: Sequence[Configuration] = (),
    rounds: int = ROUNDS,
    machine: Machine,
    progress: Progress = silent,
) -> None:
    """Measure accuracy and time of a layer's operations; write rows into ``out``, skipping operations it already has.

    algorithms: names of algorithms, or of sources, which are libraries of algorithms. None means all, or none if
    configurations are given. Torch's own algorithm is always measured. configurations: of the whole mini-batch,
    measured like algorithms. rounds: time samples of each call; short calls get more.

    Raises the errors of ``open_folder``, and ``InvalidInputError`` for unknown algorithms and configurations of other
    batch sizes. On ``KeyboardInterrupt``, everything measured so far is in the folder.
    """
    problem, n = layer.problem, layer.batch_size
    for one in configurations:
        if one.batch_size != n:
            raise InvalidInputError(
                f"configuration '{one}' has {one.batch_size} samples, and the layer {n}: give one of {n} samples, or "
                "another batch size"
            )
    permitted = Config(algorithms=(TORCHS_OWN,) if algorithms is None and configurations else algorithms)
    wanted, left_out = {}, []
    for operation in operations:
        own = problem.with_operation(operation)
        alone = permitted_algorithms(machine, permitted, own, [n])
        asked = {
            **{TORCH if one.name == TORCHS_OWN else one.name: _of(MicroConfig(one.name, n)) for one in alone},
            **{str(one): one for one in configurations},
        }
        variants, reasons = _variants(asked, own, n, machine)
        left_out += [LeftOut(f"{layer.name}, {own}: {name}", reason) for name, reason in reasons.items()]
        key = (layer.name, *problem_columns(own, n).values())
        wanted[key] = partial(_rows, variants, asked, own, n, rounds, machine)
    settings = {
        "layer": layer.name,
        "batch_size": n,
        "dtype": problem.dtype,
        "memory_format": str(problem.memory_format),
        "operations": [str(operation) for operation in operations],
        "algorithms": None if algorithms is None else list(algorithms),
        "configurations": list(map(str, configurations)),
        "rounds": rounds,
        "runs": RUNS,
    }
    header = Header(
        *("metrics", source, settings, machine.environment),
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=len(operations),
        limits={problem.dtype: MachineLimits.measured(machine.device, problem.dtype)},
    )
    write_missing(out, header, wanted, progress, machine.watch, left_out)


def _variants(
    asked: Mapping[str, Configuration], problem: ConvProblem, n: int, machine: Machine
) -> tuple[dict[str, list[Candidate]], dict[str, str]]:
    """Return the candidates of each configuration asked for, and the reasons why others cannot be measured, by name.

    Raises ``InvalidInputError`` for unknown algorithms.
    """
    parts = {part for one in asked.values() for part in one.micro_configs}
    sizes = sorted({part.micro_batch_size for part in parts})
    config = Config(algorithms=tuple(sorted({part.algorithm for part in parts})))
    proofs = machine.proofs(n, checks_samples=True)
    permitted = permitted_algorithms(machine, config, problem, sizes)
    candidates, refused = find_candidates(problem, permitted, sizes, proofs=proofs)
    found = {one.micro_config: one for one in candidates if one.micro_config in parts}
    failures = {failure.micro_config: failure.reason for failure in refused}
    if proofs is not None:
        foreign = [one for one in found.values() if one.is_foreign]
        proofs.ask(foreign)
        failures |= {one.micro_config: str(error) for one in foreign if (error := proofs.error_of(one)) is not None}
    variants, reasons = {}, {}
    for name, configuration in asked.items():
        own = dict.fromkeys(configuration.micro_configs)
        missing = next((part for part in own if part not in found or part in failures), None)
        if missing is None:
            variants[name] = [found[part] for part in own]
        else:
            not_offered = f"{missing.algorithm} is not offered for {missing.micro_batch_size} samples"
            reasons[name] = failures.get(missing) or failures.get(MicroConfig(missing.algorithm, n)) or not_offered
    return variants, reasons


def _rows(
    variants: Mapping[str, Sequence[Candidate]],
    asked: Mapping[str, Configuration],
    problem: ConvProblem,
    n: int,
    rounds: int,
    machine: Machine,
    subject: Subject,
    progress: Progress,
) -> list[Row]:
    """Return a row for each variant, with its metrics and its times, interleaved, or the reason for a failure."""
    operands = random_operands(problem, n, machine.device)
    expected = reference(problem, operands.x, operands.w, operands.y)
    image = IMAGE[problem.operation]
    spoilt = replace(operands, **{image: getattr(operands, image).clone()})
    spoil(getattr(spoilt, image))
    reached = int(dependent(problem, image, n).sum())
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], Tensor]] = {}
    for done, (name, candidates) in enumerate(variants.items()):
        progress(f"{subject['layer']}, {problem}: errors and gradients of {name}", done / (len(variants) + 1))
        configuration = asked[name]
        prepared = {one.algorithm.name: one.workspace.prepared_bytes for one in candidates}
        workspace_bytes = sum(prepared.values()) + max(one.scratch_bytes() for one in candidates)
        row = Row(subject, name, configuration=str(configuration), workspace_bytes=workspace_bytes)
        try:
            call = through_module(configuration, problem, operands)
            first = call().detach()
            more = {
                **error_norms(first, expected),
                "gradcheck": _gradcheck(configuration, candidates, problem, machine.device),
                "runs": RUNS,
                "distinct_results": distinct_results(chain([first], (call().detach() for _ in range(RUNS - 1)))),
                "not_finite": int((~through_module(configuration, problem, spoilt)().isfinite()).sum()),
                "not_finite_by_definition": reached,
                "local": all(one.algorithm.is_local(problem) for one in candidates),
            }
        except tuple(error for one in candidates for error in one.errors) as error:
            rows[name] = replace(row, failure=first_line(error))
            continue
        rows[name] = replace(row, relative_error=relative_l2_error(first, expected), more=more)
        calls[name] = call
    progress(f"{subject['layer']}, {problem}: {rounds} samples of each time, or more", 1 - 1 / (len(variants) + 1))
    rule = replace(machine.clock.every_round, time_limit_s=_LIMIT_S, max_calls=1)  # emptying caches takes longer
    count = Rounds(rounds, max(rounds, _MOST_ROUNDS), _SHORT_S)
    found = try_in_turns([Contestant(call) for call in calls.values()], count, machine.clock, rule)
    for name, times in zip(calls, found, strict=True):
        if isinstance(times, Exception):
            rows[name] = replace(rows[name], failure=first_line(times))
        else:
            rows[name] = replace(rows[name], samples_s=times)
    return [*rows.values()]


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
        reason = next(filter(None, (why_unsupported(one.algorithm, small) for one in candidates)), None)
        if reason is None:
            with threads(1):  # it makes thousands of calls of a few sums, for which threads would wait
                module = module_of(few, small, random_operands(small, few.batch_size).w)
                return gradcheck(module, small, few.batch_size)
        reasons.append(reason)
    return f"not done: {reasons[0]}"


def _of(*micro_configs: MicroConfig) -> Configuration:
    return Configuration(micro_configs, time_s=0.0, workspace_bytes=0)


def module_of(configuration: Configuration, problem: ConvProblem, w: Tensor) -> nn.Module:
    """Return a module with the filter w that computes the problem's operation by a configuration, others by torch.

    Raises ``LibraryError`` if the module would run another configuration.
    """
    geometry = (problem.c, problem.k, problem.window, problem.stride, problem.padding, problem.dilation)
    torchs, ours = (nn.Conv3d, Conv3d) if problem.is_volume else (nn.Conv2d, Conv2d)
    kind: Any = torchs if configuration.is_baseline else ours
    module: nn.Module = kind(*geometry, problem.groups, bias=False, device="meta")
    module.weight = nn.Parameter(w.detach(), requires_grad=problem.operation is not Operation.BACKWARD_DATA)
    if isinstance(module, TunedModule):
        n = configuration.batch_size
        module.choices = Choices.of({problem: {n: configuration}}, w.device.type)
        if make_executable(module.choices, problem, n) is None:
            raise LibraryError(f"a module does not run {configuration} here: see the warning before")
    return module


def through_module(configuration: Configuration, problem: ConvProblem, operands: Operands) -> Callable[[], Tensor]:
    """Return a function that runs a configuration through a module and returns the operation's newly allocated result.

    For the forward operation, the function calls the module under autograd. For a backward operation, the function lets
    autograd compute that one gradient, after an untimed forward pass. Raises the error of ``module_of``.
    """
    module = module_of(configuration, problem, operands.w)
    if problem.operation is Operation.FORWARD:
        return partial(module, operands.x)
    of_data = problem.operation is Operation.BACKWARD_DATA
    x = operands.x.detach().requires_grad_(of_data)
    y = module(x)
    wanted: Any = x if of_data else module.weight
    return lambda: torch.autograd.grad(y, wanted, operands.y, retain_graph=True)[0]


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
    columns = ("relative", "L1", "L2", "maximum", "gradcheck", "results", "by definition", "not finite", "strict")
    printed = new_table(
        f"{folder.header.source}, {folder.header.settings['layer']}",
        ("operation", "algorithm"),
        (*columns, "ms", "workspace"),
    )
    before = ""
    for row in folder.lines:
        operation = row["operation"]
        if operation != before:
            printed.add_row()
        cells = [row["failure"]] if row["failure"] else _cells(row)
        printed.add_row("" if operation == before else operation, row["contestant"], *cells)
        before = operation
    yield printed
    unusual: dict[str, list[str]] = {}
    for row in folder.lines:
        if row.get("gradcheck", PASSED) != PASSED:
            unusual.setdefault(f"gradcheck {row['gradcheck']}", []).append(row["contestant"])
    for one in folder.left_out:
        unusual.setdefault(one.reason, []).append(one.what.rpartition(": ")[2])
    notes = (f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in unusual.items())
    yield "\n".join((*_LEGEND, *notes, *folder.problems))


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    for name in ("relative_error", "error_l1", "error_l2", "error_max"):
        yield "not finite" if row[name] is None else f"{row[name]:.1e}"
    yield row["gradcheck"].partition(":")[0]
    yield f"{row['distinct_results']} of {row['runs']}"
    yield f"{row['not_finite_by_definition']:,}"
    yield f"{row['not_finite']:,}"
    yield "yes" if row["local"] else "no"
    yield milliseconds(median(row["samples_s"]))
    yield format_bytes(row["workspace_bytes"])


PASSED = "passed"
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtype by bytes of an element
# Channels of each group, groups, and pixels of y after the first in each direction, of a layer that is cut down.
_CHANNELS, _GROUPS, _WINDOWS = 3, 2, 2


def error_norms(actual: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the L1, L2 and maximum norms of ``actual - expected`` in float64, by column name.

    All three norms are infinite if ``actual`` has NaN or Inf.

    >>> error_norms(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 5.0]))
    {'error_l1': 7.0, 'error_l2': 5.0, 'error_max': 4.0}
    """
    error = (actual.double() - expected.double()).flatten()
    orders = {"error_l1": 1, "error_l2": 2, "error_max": inf}
    if not error.isfinite().all():
        return dict.fromkeys(orders, inf)
    return {name: float(torch.linalg.vector_norm(error, order)) for name, order in orders.items()}


def distinct_results(results: Iterable[Tensor]) -> int:
    """Return the number of bitwise distinct results. -0 differs from 0, and a NaN equals itself.

    >>> distinct_results([torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([0.0])])
    2
    """
    found: list[Tensor] = []
    for result in results:
        bits = result.view(_BITS[result.itemsize])
        if not any(torch.equal(bits, other) for other in found):
            found.append(bits)
    return len(found)


def cut_down(problem: ConvProblem) -> tuple[ConvProblem, ConvProblem]:
    """Return two float64 versions of a problem with few channels: the first with few pixels, the second with all.

    Filter, stride, padding and dilation are unchanged. The second is for algorithms that support only large images.
    """
    groups = min(problem.groups, _GROUPS)
    c, k = (groups * min(channels // problem.groups, _CHANNELS) for channels in (problem.c, problem.k))
    axes = zip(problem.extent, problem.window, problem.dilation, problem.stride, strict=True)
    pixels = [min(size, (taps - 1) * dilation + 1 + _WINDOWS * stride) for size, taps, dilation, stride in axes]
    large = replace(problem, c=c, k=k, groups=groups, dtype="float64")
    return large.with_extent(tuple(pixels)), large


def gradcheck(module: nn.Module, problem: ConvProblem, samples: int) -> str:
    """Run torch's gradcheck of y by x and w on a module that computes a float64 problem; return ``PASSED`` or why not.

    The fast mode of gradcheck is not used: it accepts an error of 5 %.
    """
    operands = random_operands(problem, samples)
    inputs = tuple(tensor.requires_grad_() for tensor in (operands.x, operands.w))
    try:
        with torch.enable_grad():
            torch.autograd.gradcheck(
                lambda x, w: functional_call(module, {"weight": w}, (x,)), inputs, check_undefined_grad=False
            )
    except GradcheckError as error:
        return f"failed: {first_line(error)}"
    return PASSED
