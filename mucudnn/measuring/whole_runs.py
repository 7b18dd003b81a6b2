"""Whole runs: complete calls of tuned convolutions, as users make them, compared with torch's own convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from mucudnn.core.errors import CANDIDATE_ERRORS, raise_interruption, say_once, without_frames
from mucudnn.core.problem import ConvProblem, Operation, Sizes
from mucudnn.core.records import Comparison, Configuration, Environment
from mucudnn.kernels.algorithm import Algorithm, AlgorithmSource
from mucudnn.kernels.compiled.library import shortcoming
from mucudnn.kernels.memory import give_back_cache, is_out_of_memory
from mucudnn.kernels.registry import algorithms, sources
from mucudnn.kernels.torch_convolution import torch_convolution
from mucudnn.measuring.candidates import Candidate, Proofs
from mucudnn.measuring.clocks import Clock, ColdClock, CudaClock, WallClock
from mucudnn.measuring.heap import unkept_in_words
from mucudnn.measuring.load import Watch, watch_of
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.proofs import Proof
from mucudnn.measuring.proving.prover import Prover, prover
from mucudnn.measuring.turns import RACE, compare_in_turns
from mucudnn.running.choices import Choices
from mucudnn.running.devices import current_environment, made_current
from mucudnn.running.executable import Executable
from mucudnn.running.operators import convolve


def training_operands(problem: ConvProblem, batch_size: int, device: str = "cpu") -> Operands:
    """Return random operands for training: in FORWARD the filter requires a gradient, so autograd records."""
    with torch.inference_mode(False):
        operands = random_operands(problem, batch_size, device)
        operands.w.requires_grad_(problem.operation is Operation.FORWARD)
    return operands


def whole_run(
    problem: ConvProblem, configuration: Configuration, operands: Operands, *, keeps_workspace: bool = True
) -> Callable[[], Tensor]:
    """Return a function that calls a tuned ``mucudnn.Conv2d``, as users do, and returns the result.

    For the baseline, it calls torch's own convolution.

    keeps_workspace: whether the workspace is kept between calls.

    Raises the errors of ``Executable.of`` and ``Executable.build``. The returned function has no fallback and raises
    all errors.
    """
    if configuration.is_baseline:
        return partial(run_torch, problem, operands)
    device = operands.x.device
    with made_current(device):
        executable = Executable.of(problem, configuration, device_type=device.type, keeps_workspace=keeps_workspace)
        executable.build()
    call, geometry = _call(problem, operands)
    return partial(convolve, *call, *geometry, Choices({}, device.type, measured=executable))


def run_torch(problem: ConvProblem, operands: Operands) -> Tensor:
    """Call the baseline (torch's own convolution, undivided); return the result of the operation."""
    call, geometry = _call(problem, operands)
    return torch_convolution(*call, geometry)


def _call(
    problem: ConvProblem, operands: Operands
) -> tuple[tuple[Operation, Tensor, Tensor, Tensor | None], tuple[Sizes, Sizes, Sizes, int]]:
    """Return the arguments of a convolution call: (operation, x, w, dy), and the geometry (stride, padding, ...)."""
    third = None if problem.operation is Operation.FORWARD else operands.y
    geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
    return (problem.operation, operands.x, operands.w, third), geometry


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that tuning runs on; tests substitute another.

    algorithms: offered for every problem.
    sources: objects that offer algorithms for single problems.
    whole_run, run_torch: replacements of the functions with these names.
    watch: observer of the load.
    prover: client of the process that proves foreign code; None if foreign code is checked in this process.
    """

    environment: Environment
    algorithms: Sequence[Algorithm]
    device: str = "cpu"
    clock: Clock = field(default_factory=WallClock)
    whole_run: Callable[..., Callable[[], object]] = whole_run
    run_torch: Callable[[ConvProblem, Operands], object] = run_torch
    sources: Sequence[AlgorithmSource] = ()
    watch: Watch = field(default_factory=Watch)
    prover: Prover | None = None

    @classmethod
    def current(cls, device: str = "cpu", keep_heap: bool | None = None) -> Machine:
        """Return the machine with this device, with a warning, once, if it lacks compiled algorithms for it.

        Times with and without a kept heap differ, so that ``Config.keep_heap`` is part of the environment on the CPU.
        Raises ``UnavailableError`` if the device is missing.
        """
        environment = current_environment(device)
        if device == "cpu":
            if lack := shortcoming():
                say_once(f"mucudnn's fast algorithms for this CPU are missing: {lack}")
            library = ", ".join(filter(None, (environment.library, unkept_in_words(keep_heap))))
            environment = replace(environment, library=library)
        offered, watch = sources(device), watch_of(device)
        clock = ColdClock() if device == "cpu" else CudaClock()
        return cls(environment, algorithms(device), device, clock, sources=offered, watch=watch, prover=prover())

    def proofs(self, batch_size: int, *, waits: bool = True) -> Proofs | None:
        """Return a new ``Proofs`` for the foreign candidates of one problem; None if this machine has no prover.

        waits: as for ``Prover.prove``.
        """
        if self.prover is None:
            return None
        run_in_process = partial(self.prover.prove, batch_size=batch_size, device=self.device, waits=waits)

        def prove(candidates: Sequence[Candidate]) -> list[Proof | Exception]:
            answers = run_in_process(candidates)
            self.watch.forget()  # the proving process must not count as load of others
            return answers

        return Proofs(prove, batch_size)

    def compare(
        self,
        problem: ConvProblem,
        batch_size: int,
        configurations: Sequence[Configuration],
        *,
        keeps_workspace: bool,
    ) -> list[Comparison | Exception | None]:
        """Compare whole calls of the configurations with torch's own, interleaved; return a result or error for each.

        All results are None if there is not enough memory for the mini-batch or for torch's own.

        keeps_workspace: whether the workspace is kept between calls.
        """
        try:
            operands = training_operands(problem, batch_size, self.device)
            runs = list[Callable[[], object]]()
            for configuration in configurations:
                try:
                    runs.append(self.whole_run(problem, configuration, operands, keeps_workspace=keeps_workspace))
                except CANDIDATE_ERRORS as error:  # raised when the call is timed, so that the others are compared
                    runs.append(partial(_fail, without_frames(error)))
            with torch.inference_mode(False), torch.enable_grad():
                baseline = partial(self.run_torch, problem, operands)
                return [*compare_in_turns(baseline, runs, self.clock, RACE, self.watch)]
        except CANDIDATE_ERRORS as error:
            raise_interruption(error)
            if not is_out_of_memory(error):
                raise
        give_back_cache()
        return [None] * len(configurations)


def _fail(error: Exception) -> None:
    raise error
