"""Accuracy and time of a convolution layer's operations, by torch, by every algorithm and by configurations.

Measured are errors with an error map, gradients, repeatability, time, and the overhead of the framework. For the
overhead, a configuration is called through a PyTorch module, as in training, and its algorithms are called alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mucudnn.bench.contests.bounds import MachineLimits
from mucudnn.bench.contests.timing import Contestant, Samples, TurnRounds, try_in_turns
from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import LeftOut
from mucudnn.bench.folders.rows import PROBLEM_COLUMNS, Row, Subject, problem_columns
from mucudnn.bench.folders.writing import write_missing
from mucudnn.bench.sources.layers import Layer
from mucudnn.bench.suites.accuracy.metrics import (
    SAMPLES,
    Compute,
    cut_down,
    directional_error,
    exact,
    gradcheck,
    with_errors,
)
from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.candidates import Candidate, find_candidates
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.whole_runs import Machine, run_torch, run_whole
from mucudnn.modules.conv2d import Conv2d
from mucudnn.running.choices import Choices
from mucudnn.running.workspace import lasting_buffer
from mucudnn.tuning.benchmarker import permitted_algorithms
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError, LibraryError, first_line
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress, silent
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.torch_settings import TORCHS_OWN

ROUNDS, RUNS = 15, 5
# Short calls are sampled for SHORT_S seconds, which reduces the noise to a few percent.
MOST_ROUNDS, SHORT_S = 41, 0.2
_LIMIT_S = 3.0  # for each call: some algorithms are a hundred times slower


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Options of the accuracy benchmark that select what to measure.

    algorithms: names of algorithms, or of sources, which are libraries of algorithms. None means all, or none if
    configurations are given. Torch's own algorithm is always measured. configurations: of the whole mini-batch,
    measured like algorithms. rounds: time samples of each call; short calls get more, up to ``MOST_ROUNDS``. runs:
    number of results that are compared bit by bit.
    """

    operations: Sequence[Operation] = tuple(Operation)
    algorithms: tuple[str, ...] | None = None
    rounds: int = ROUNDS
    runs: int = RUNS
    configurations: Sequence[Configuration] = ()

    @property
    def permitted(self) -> Config:
        """Return a config that permits only the algorithms to be measured, on the undivided mini-batch."""
        return Config(algorithms=(TORCHS_OWN,) if self.algorithms is None and self.configurations else self.algorithms)


@dataclass(frozen=True, slots=True)
class Untimed:
    """A result row that has no times yet, and the calls to time for it.

    calls: the call through a module, then the call of the algorithm alone if possible; empty if measuring failed.
    """

    row: Row
    calls: tuple[Callable[[], object], ...] = ()


def timed(every: Sequence[Untimed], options: MetricsOptions, machine: Machine) -> list[Row]:
    """Time the calls of all rows, interleaved; return the rows with their time samples or the reason for a failure."""
    rounds = TurnRounds(options.rounds, max(options.rounds, MOST_ROUNDS), SHORT_S)
    contestants = [Contestant(call) for one in every for call in one.calls]
    rule = replace(machine.clock.every_round, time_limit_s=_LIMIT_S)
    times = iter(try_in_turns(contestants, rounds, machine.clock, rule))
    return [_with_times(one.row, [next(times) for _ in one.calls]) for one in every]


def _with_times(row: Row, times: Sequence[Samples | Exception]) -> Row:
    failed = [time for time in times if isinstance(time, Exception)]
    if failed or not times:
        return replace(row, failure=row.failure or first_line(failed[0]))
    call_s, *alone_s = (time for time in times if isinstance(time, tuple))
    return replace(row, samples_s=call_s, more={**row.more, "alone_samples_s": alone_s[0] if alone_s else []})


def benchmark_metrics(
    source: str,
    layer: Layer,
    options: MetricsOptions,
    out: Path,
    *,
    device: str = "cpu",
    progress: Progress = silent,
    machine: Machine | None = None,
) -> None:
    """Measure accuracy and time of a layer's operations; write rows into ``out``, skipping operations it already has.

    machine: the machine to measure on; this one by default.

    Raises the errors of ``open_folder``, and ``InvalidInputError`` for unknown algorithms and configurations of other
    batch sizes. On ``KeyboardInterrupt``, everything measured so far is in the folder.
    """
    machine = machine or Machine.current(device)
    problems = (layer.problem.with_operation(operation) for operation in options.operations)
    every = [_OfProblem(layer, problem, options, machine) for problem in problems]
    left_out = [one for of_problem in every for one in of_problem.left_out]
    wanted = {one.key: one.rows for one in every}
    write_missing(out, _header(source, layer, options, machine), wanted, progress, machine.watch, left_out)


def _header(source: str, layer: Layer, options: MetricsOptions, machine: Machine) -> Header:
    problem = layer.problem
    settings = {
        "layer": layer.name,
        "batch_size": layer.batch_size,
        "dtype": problem.dtype,
        "memory_format": str(problem.memory_format),
        "operations": [str(operation) for operation in options.operations],
        "algorithms": None if options.algorithms is None else list(options.algorithms),
        **({"configurations": list(map(str, options.configurations))} if options.configurations else {}),
        "rounds": options.rounds,
        "runs": options.runs,
    }
    return Header(
        *("metrics", source, settings, machine.environment),
        subject_columns=("layer", *PROBLEM_COLUMNS),
        wanted=len(options.operations),
        limits={problem.dtype: MachineLimits.measured(machine.device, problem.dtype)},
    )


@dataclass(frozen=True, slots=True)
class _Variant:
    """An algorithm or a configuration to be measured.

    name: as shown in tables. candidates: its pairs of algorithm and micro-batch size.
    """

    name: str
    configuration: Configuration
    candidates: Sequence[Candidate]

    @property
    def workspace_bytes(self) -> int:
        prepared = {one.algorithm.name: one.workspace.prepared_bytes for one in self.candidates}
        return sum(prepared.values()) + max(one.scratch_bytes for one in self.candidates)


class _OfProblem:
    """The measurement of one operation of a layer by every algorithm and configuration that can compute it."""

    def __init__(self, layer: Layer, problem: ConvProblem, options: MetricsOptions, machine: Machine) -> None:
        self.problem, self._n, self._options, self._machine = problem, layer.batch_size, options, machine
        self._label = f"{layer.name}, {problem}"
        self.key = (layer.name, *problem_columns(problem, self._n).values())
        reasons: dict[str, str] = {}
        self._variants = [*self._variants_of(options, reasons)]
        self.left_out = [LeftOut(f"{self._label}: {name}", reason) for name, reason in reasons.items()]

    def _variants_of(self, options: MetricsOptions, reasons: dict[str, str]) -> Iterator[_Variant]:
        """Yield the algorithms and configurations that can be measured; add to ``reasons``, by name, why others cannot.

        Raises ``InvalidInputError`` for unknown algorithms, and for configurations of other batch sizes.
        """
        asked: dict[str, Configuration] = {}
        for one in permitted_algorithms(self._machine, options.permitted, self.problem, [self._n]):
            name = TORCH if one.name == TORCHS_OWN else one.name
            asked[name] = configuration_of(MicroConfig(one.name, self._n))
        for configuration in options.configurations:
            if configuration.batch_size != self._n:
                raise InvalidInputError(
                    f"configuration '{configuration}' has {configuration.batch_size} samples, and the layer "
                    f"{self._n}: give one of {self._n} samples, or another batch size"
                )
            asked[str(configuration)] = configuration
        found, failures = self._candidates({part for one in asked.values() for part in one.micro_configs})
        for name, configuration in asked.items():
            parts = dict.fromkeys(configuration.micro_configs)
            if missing := next((part for part in parts if part not in found), None):
                not_offered = f"{missing.algorithm} is not offered for {missing.micro_batch_size} samples"
                at_all = MicroConfig(missing.algorithm, self._n)
                reasons[name] = failures.get(missing) or failures.get(at_all) or not_offered
            else:
                yield _Variant(name, configuration, [found[part] for part in parts])

    def _candidates(self, parts: set[MicroConfig]) -> tuple[dict[MicroConfig, Candidate], dict[MicroConfig, str]]:
        """Return the candidates that can run and give correct results, and the reasons why others cannot be used."""
        sizes = sorted({part.micro_batch_size for part in parts})
        config = Config(algorithms=tuple(sorted({part.algorithm for part in parts})))
        algorithms = permitted_algorithms(self._machine, config, self.problem, sizes)
        proofs = self._machine.proofs(self._n, checks_samples=True)
        candidates, failures = find_candidates(self.problem, algorithms, sizes, proofs=proofs)
        found = {one.micro_config: one for one in candidates if one.micro_config in parts}
        reasons = {failure.micro_config: failure.reason for failure in failures}
        if proofs is not None:
            foreign = [one for one in found.values() if one.is_foreign]
            proofs.ask(foreign)
            reasons |= {one.micro_config: str(error) for one in foreign if (error := proofs.error_of(one)) is not None}
        return {one: candidate for one, candidate in found.items() if one not in reasons}, reasons

    def rows(self, subject: Subject, progress: Progress) -> list[Row]:
        """Return a row for each algorithm and configuration, with its measurements or the reason for a failure."""
        progress(self._label, 0.0)
        operands = random_operands(self.problem, self._n, self._machine.device)
        expected, writable = exact(self.problem, operands), operands.with_own_result(self.problem.operation)
        every = [self._untimed(subject, one, operands, writable, expected) for one in self._variants]
        del expected
        return timed(every, self._options, self._machine)

    def _untimed(
        self, subject: Subject, one: _Variant, operands: Operands, writable: Operands, expected: Tensor
    ) -> Untimed:
        row = Row(subject, one.name, configuration=str(one.configuration))
        try:
            through = through_module(one.configuration, self.problem, operands)
            by_itself = alone(one.configuration, self.problem, writable)
            by_itself()
            measured = replace(row, workspace_bytes=one.workspace_bytes, more=self._gradients(one))
            return Untimed(with_errors(measured, through, expected, self._options.runs), (through, by_itself))
        except tuple(error for candidate in one.candidates for error in candidate.errors) as error:
            return Untimed(replace(row, failure=first_line(error)))

    def _gradients(self, one: _Variant) -> dict[str, Any]:
        few = of_few(one.configuration, SAMPLES)

        def compute(problem: ConvProblem, operands: Operands) -> Tensor:
            return run_whole(problem, few, operands)

        return {
            "gradient_error": directional_error(self.problem, compute, self._machine.device, few.batch_size),
            "gradcheck": self._gradcheck(one, compute, few.batch_size),
        }

    def _gradcheck(self, one: _Variant, compute: Compute, samples: int) -> str:
        if self._machine.device != "cpu":
            return "not done: it runs on the CPU"
        reasons = []
        for small in cut_down(self.problem):
            reason = next(filter(None, (candidate.algorithm.supports(small) for candidate in one.candidates)), None)
            if reason is None:
                return gradcheck(small, compute, samples)
            reasons.append(reason)
        return f"not done: {reasons[0]}"


def configuration_of(*micro_configs: MicroConfig) -> Configuration:
    """Return a configuration of these micro-batches, with time and workspace set to 0 because they are unknown."""
    return Configuration(micro_configs, time_s=0.0, workspace_bytes=0)


def of_few(configuration: Configuration, samples: int) -> Configuration:
    """Return a configuration with the same algorithms, each computing an equal share of about ``samples`` samples."""
    names = configuration.algorithms
    if len(configuration.micro_configs) == 1:
        return configuration_of(MicroConfig(names[0], samples))
    of_each = range(-(-samples // len(names)))
    return configuration_of(*(MicroConfig(name, 1) for name in names for _ in of_each))


def through_module(configuration: Configuration, problem: ConvProblem, operands: Operands) -> Callable[[], Tensor]:
    """Return a function that runs a configuration through a module and returns the operation's newly allocated result.

    For the forward operation, the function calls the module under autograd. For a backward operation, the function lets
    autograd compute that one gradient, after an untimed forward pass. Torch's own convolution runs in ``nn.Conv2d``,
    all other algorithms in ``mucudnn.Conv2d``.

    Raises ``LibraryError`` if the module would run another configuration.
    """
    module = _module(configuration, problem, operands)
    if problem.operation is Operation.FORWARD:
        return partial(module, operands.x)
    of_data = problem.operation is Operation.BACKWARD_DATA
    x = operands.x.detach().requires_grad_(of_data)
    y = module(x)
    wanted = x if of_data else module.weight
    return lambda: torch.autograd.grad(y, wanted, operands.y, retain_graph=True)[0]


def alone(configuration: Configuration, problem: ConvProblem, operands: Operands) -> Callable[[], object]:
    """Return a function that runs a configuration's algorithms alone, and writes their result into ``operands``.

    The function uses neither a module nor autograd, and allocates nothing except torch's own convolution's result.
    """
    if configuration.is_baseline:
        return partial(run_torch, problem, operands)
    device, parts, w = operands.x.device, configuration.micro_configs, operands.w
    algorithms = {name: algorithm(name, device.type) for name in configuration.algorithms}
    sizes = {part: algorithms[part.algorithm].workspace(problem, part.micro_batch_size) for part in parts}
    prepared = {part.algorithm: lasting_buffer(size.prepared_bytes).to(device) for part, size in sizes.items()}
    scratch = lasting_buffer(max(size.scratch_bytes for size in sizes.values())).to(device)
    opened = [(algorithms[name], buffer) for name, buffer in prepared.items()]
    slices = [torch.split(tensor, [part.micro_batch_size for part in parts]) for tensor in (operands.x, operands.y)]
    steps = [
        (algorithms[one.algorithm], prepared[one.algorithm], x, y) for one, x, y in zip(parts, *slices, strict=True)
    ]

    def call() -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            w.zero_()
        for one, own in opened:
            one.open(problem, w, own)
        for one, own, x, y in steps:
            one.step(problem, x, w, y, None, own, scratch)
        for one, own in opened:
            one.close(problem, w, own)

    return call


def _module(configuration: Configuration, problem: ConvProblem, operands: Operands) -> nn.Conv2d:
    geometry = (problem.c, problem.k, (problem.r, problem.s), problem.stride, problem.padding, problem.dilation)
    kind = nn.Conv2d if configuration.is_baseline else Conv2d
    module = kind(*geometry, problem.groups, bias=False, device="meta")
    module.weight = nn.Parameter(operands.w.detach(), requires_grad=problem.operation is not Operation.BACKWARD_DATA)
    if isinstance(module, Conv2d):
        n = operands.batch_size
        module.choices = Choices.of({problem: {n: configuration}}, operands.x.device.type)
        executable = module.choices.executable(problem, n)
        if executable is None or executable.configuration != module.choices.configuration(problem, n):
            raise LibraryError(f"a module does not run {configuration} here: see the warning before")
    return module
