"""Executables: configurations made ready to run; how they are cached, and repaired where a step fails.

What can be known beforehand (algorithms, slices, where everything lies in the workspace) is resolved once, so that a
call does little more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from mucudnn.kernels.contract.algorithm import Algorithm, Bindable, BoundStage, Fusing, Workspace, fuses
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.kernels.libraries import settings_that_bar
from mucudnn.kernels.registry import algorithm as algorithm_named
from mucudnn.running.devices import made_current
from mucudnn.running.eager.bound import BoundInPython, bound_executable
from mucudnn.running.eager.hot_path import Bound, known_key
from mucudnn.running.eager.plain import is_plain
from mucudnn.running.problems import DTYPE_NAMES, problem_of
from mucudnn.running.workspace import lasting_buffer, workspace_of
from mucudnn.words.errors import CapturingError, InvalidInputError, LibraryError, MisalignedError, UnavailableError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig
from mucudnn.words.warning import say_once

BUFFER_BYTES = 256  # on whose multiples each buffer begins: as CUDA allocates, and libraries may count on

ExecutableKey = bytes | tuple[Any, ...]
_EXECUTABLES_CACHED = 4096  # of one ``ExecutableSource``; shapes that never come back must not pile up

# Steps that have failed, with the words of their library: for the rest of the process
_failed: dict[tuple[torch.device, ConvProblem, MicroConfig], str] = {}


class StepError(LibraryError):
    """A step of an executable cannot be built or executed: its library's words. Raised from the ``LibraryError``."""

    def __init__(self, problem: ConvProblem, micro_config: MicroConfig, error: LibraryError) -> None:
        super().__init__(str(error))
        self.problem, self.micro_config, self._error = problem, micro_config, error

    def __reduce__(self) -> tuple[object, ...]:
        return StepError, (self.problem, self.micro_config, self._error)

    @property
    def is_lack_of_memory(self) -> bool:
        return self._error.is_lack_of_memory


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a configuration that one algorithm computes.

    slices: its micro-batches along N, in turn. prepared: where its prepared bytes lie in the workspace; if
    ``is_cached``, in a buffer of their own, which outlives the call. fuses: whether it computes an ``Epilogue``.
    """

    algorithm: Algorithm
    slices: tuple[slice, ...]
    prepared: slice
    is_cached: bool = False
    fuses: bool = False

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
        epilogue: Epilogue | None,
    ) -> None:
        """Compute one micro-batch, and the epilogue: inside the algorithm, or after it."""
        if self.fuses and epilogue is not None:
            fusing: Fusing = self.algorithm  # type: ignore[assignment]
            fusing.step(problem, x, w, y, bias, prepared, scratch, epilogue)
            return
        self.algorithm.step(problem, x, w, y, bias, prepared, scratch)
        if epilogue is not None:
            epilogue.apply(y)


@dataclass(frozen=True, slots=True)
class Executable:
    """A configuration of one problem, resolved for one thread count and one device.

    ``workspace_bytes`` is what is handed to the algorithms: their prepared buffers side by side, then the largest
    scratch, each from a multiple of ``BUFFER_BYTES``. What libraries allocate by themselves comes on top: a workspace
    that is kept may have ``most_kept_bytes`` beside it, or what the executable itself needs.

    bound: the same in fewer calls, where all of its algorithms can be bound; else ``None``. bound_in_python: that in
    Python, which in FORWARD takes a prepared buffer and an epilogue, too.
    """

    problem: ConvProblem
    configuration: Configuration
    stages: tuple[Stage, ...]
    scratch: slice
    keeps_workspace: bool = True
    alignment_bytes: int = 1
    most_kept_bytes: float = inf
    bound: Bound | None = field(default=None, compare=False, repr=False)
    bound_in_python: BoundInPython | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        problem: ConvProblem,
        configuration: Configuration,
        cached: str | None = None,
        *,
        device_type: str = "cpu",
        keeps_workspace: bool = True,
    ) -> Executable:
        """Resolve a configuration for the current device, which is of this type.

        cached: the algorithm whose prepared buffer is handed to ``execute``, as ``prepare`` has filled it.
        keeps_workspace: whether the CPU's workspace outlives a call.

        Raises ``InvalidInputError`` for an algorithm that is not registered, or cannot compute the problem;
        ``LibraryError`` and ``UnavailableError`` for one of a library that is not there.
        """
        sizes_of = {
            name: [m.micro_batch_size for m in configuration.micro_configs if m.algorithm == name]
            for name in configuration.algorithms
        }
        placed = iter(_placed(list(chain.from_iterable(sizes_of.values()))))
        stages = []
        prepared_end = scratch_bytes = 0
        for name, sizes in sizes_of.items():
            chosen = _capable(name, problem, device_type)
            workspaces = [chosen.workspace(problem, size) for size in set(sizes)]
            prepared = _aligned(0 if name == cached else prepared_end, max(w.prepared_bytes for w in workspaces))
            slices = tuple(islice(placed, len(sizes)))
            stages.append(Stage(chosen, slices, prepared, name == cached, fuses(chosen, problem)))
            if name != cached:
                prepared_end = prepared.stop
            scratch_bytes = max(scratch_bytes, *(w.scratch_bytes for w in workspaces))
        scratch = _aligned(prepared_end, scratch_bytes)
        alignment_bytes = max((stage.algorithm.alignment_bytes for stage in stages), default=1)
        bound = in_python = None
        if device_type == "cpu" and alignment_bytes == 1:
            bound, in_python = _bound(problem, configuration.batch_size, stages, scratch, keeps_workspace)
        parts = tuple(stages), scratch, keeps_workspace, alignment_bytes, inf, bound, in_python
        return cls(problem, configuration, *parts)

    @property
    def workspace_bytes(self) -> int:
        end: int = self.scratch.stop
        return end

    @property
    def steps(self) -> Iterator[tuple[Algorithm, int]]:
        """Steps: each algorithm with each micro-batch size that it runs, once."""
        for stage in self.stages:
            for size in dict.fromkeys(micro_batch.stop - micro_batch.start for micro_batch in stage.slices):
                yield stage.algorithm, size

    def takes(self, epilogue: Epilogue, x: Tensor) -> bool:
        """Tell whether a step computes an epilogue itself, and this one can be: what is added is as y is."""
        if not any(stage.fuses for stage in self.stages):
            return False
        added = epilogue.added
        return added is None or (
            is_plain(added)
            and added.shape == self.problem.y_shape(len(x))
            and added.dtype is x.dtype
            and added.device == x.device
        )

    def build(self) -> None:
        """Have ready what is built once, so that ``execute`` can be captured in a CUDA graph.

        Raises ``StepError`` where a step cannot be built.
        """
        for algorithm, size in self.steps:
            self.build_step(algorithm, size)

    def build_step(self, algorithm: Algorithm, micro_batch_size: int) -> None:
        """Build one of ``steps``. Raises as ``build``."""
        try:
            algorithm.build(self.problem, micro_batch_size)
        except LibraryError as error:
            raise StepError(self.problem, MicroConfig(algorithm.name, micro_batch_size), error) from error

    def prepare(self, w: Tensor) -> Tensor:
        """Prepare w for any number of calls, by the cached algorithm. Returns a new buffer, 1-D uint8.

        w: (K, C // groups, R, S), dense, in the problem's memory format.
        """
        (stage,) = (stage for stage in self.stages if stage.is_cached)
        prepared = lasting_buffer(stage.prepared.stop)
        stage.algorithm.open(self.problem, w, prepared)
        return prepared

    def execute(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None = None,
        cached: Tensor | None = None,
        epilogue: Epilogue | None = None,
    ) -> None:
        """Compute the problem's operation on a mini-batch, into the tensor that it writes.

        x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), bias: (K,) or None. All are dense, in the
        problem's memory format, and N is the configuration's: this is not checked here. cached: what ``prepare``
        returned for this w; only for an executable with a cached algorithm. epilogue: of y, in FORWARD. Their device is
        the current one.

        Raises ``MisalignedError``; ``StepError`` where a library fails; what torch raises for lack of memory.
        """
        problem, alignment_bytes = self.problem, self.alignment_bytes
        if alignment_bytes > 1 and (x.data_ptr() | w.data_ptr() | y.data_ptr()) % alignment_bytes:
            raise MisalignedError(
                f"{self.configuration} needs tensors that begin on a multiple of {alignment_bytes} bytes; clone views"
            )
        if problem.operation is Operation.BACKWARD_FILTER:
            w.zero_()
        workspace = workspace_of(self.workspace_bytes, x.device, self.keeps_workspace, self.most_kept_bytes)
        scratch = workspace[self.scratch]
        for stage in self.stages:
            micro_batch = stage.slices[0]
            try:
                if stage.is_cached:
                    assert cached is not None
                    prepared = cached
                else:
                    prepared = workspace[stage.prepared]
                    stage.algorithm.open(problem, w, prepared)
                for micro_batch in stage.slices:
                    x_in, y_in = _taken(x, micro_batch), _taken(y, micro_batch)
                    of_slice = None if epilogue is None else epilogue.of(micro_batch)
                    stage.step(problem, x_in, w, y_in, bias, prepared, scratch, of_slice)
                stage.algorithm.close(problem, w, prepared)
            except LibraryError as error:
                failed = MicroConfig(stage.algorithm.name, micro_batch.stop - micro_batch.start)
                raise StepError(problem, failed, error) from error


def _bound(
    problem: ConvProblem, batch_size: int, stages: Sequence[Stage], scratch: slice, keeps_workspace: bool
) -> tuple[Bound, BoundInPython] | tuple[None, None]:
    """Bind every stage; ``None`` if one cannot be bound."""
    bound: list[tuple[BoundStage, int | None]] = []
    for stage in stages:
        workspace = Workspace(stage.prepared.stop - stage.prepared.start, scratch.stop - scratch.start)
        algorithm = stage.algorithm
        if not isinstance(algorithm, Bindable):
            return None, None
        one = algorithm.bound(problem, batch_size, stage.slices, workspace, is_open=stage.is_cached)
        if one is None:
            return None, None
        bound.append((one, None if stage.is_cached else stage.prepared.start))
    return bound_executable(problem, batch_size, bound, scratch, keeps_workspace, all(stage.fuses for stage in stages))


def _capable(name: str, problem: ConvProblem, device_type: str) -> Algorithm:
    chosen = algorithm_named(name, device_type)
    reason = chosen.supports(problem)
    if reason is not None:
        raise InvalidInputError(f"algorithm {name!r} cannot compute {problem}: {reason}")
    return chosen


def _taken(images: Tensor, micro_batch: slice) -> Tensor:
    """Take these samples. All of them are the tensor itself: making a view takes a microsecond."""
    return images if micro_batch.stop - micro_batch.start == len(images) else images[micro_batch]


def _aligned(end: int, size: int) -> slice:
    """Find the next ``size`` bytes after ``end`` that begin on a multiple of ``BUFFER_BYTES``."""
    start = -(-end // BUFFER_BYTES) * BUFFER_BYTES
    return slice(start, start + size)


def _placed(sizes: Sequence[int]) -> list[slice]:
    """Place slices of these sizes along N, side by side.

    Each begins on a multiple of the largest power of two that divides its own size, whatever the order in which they
    run: they lie in descending order of these powers. So all sizes before a slice are multiples of its power, and so is
    their sum, at which it begins. Libraries may count on it.
    """
    slices = [slice(0)] * len(sizes)
    start = 0
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index] & -sizes[index], reverse=True):
        slices[index] = slice(start, start + sizes[index])
        start += sizes[index]
    return slices


# The cache


class ExecutableSource(Protocol):
    """Maker of executables, with a cache of those that were asked for."""

    device_type: str
    executables: dict[ExecutableKey, Executable | None]

    def executable(self, problem: ConvProblem, n: int) -> Executable | None:
        """Make what runs ``problem`` on ``n`` samples; ``None``: torch's own. Raises ``MucudnnError``s."""


def executable_of(
    choices: ExecutableSource,
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Executable | None:
    """Find the executable of a call; ``None``: torch's own convolution runs it. third: bias or dy.

    It is made when it is first needed, and cached by all that affects the choice. Calls that the extension does not
    know come here, so that the key has plain numbers.

    Raises ``CapturingError`` where an executable would have to be made while a CUDA graph is captured; ``StepError``
    where there is no memory to make it with.
    """
    key = known_key(operation, x, w, third, stride, padding, dilation, groups) or (
        *(operation, *stride, *padding, *dilation, groups),
        *(x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device),
        None if third is None else (third.shape, third.dtype, third.device),
        settings_that_bar() if x.is_cuda else torch.get_num_threads(),
    )
    try:
        return choices.executables[key]
    except KeyError:
        executable = _resolve(choices, operation, x, w, third, stride, padding, dilation, groups)
    if len(choices.executables) >= _EXECUTABLES_CACHED:
        choices.executables.clear()
    choices.executables[key] = executable
    return executable


def forget(choices: ExecutableSource, executable: Executable | None) -> None:
    """Have the executable made anew when it is next asked for."""
    for key, cached in list(choices.executables.items()):
        if cached is executable:
            choices.executables.pop(key, None)


def _resolve(
    choices: ExecutableSource,
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Executable | None:
    """Make the executable of a call.

    ``None`` too for what is no convolution (torch says what is wrong), and for algorithms that this machine lacks.
    """
    tensors = [tensor for tensor in (x, w, third) if tensor is not None]
    alike = {(tensor.dtype, tensor.device, tensor.layout) for tensor in tensors} == {(x.dtype, x.device, torch.strided)}
    if not alike or x.dtype not in DTYPE_NAMES or x.device.type != choices.device_type:
        return None
    if x.dim() != 4 or w.dim() != 4 or len(x) == 0 or groups < 1:
        return None
    geometry = ((stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1]), groups)
    try:
        problem = problem_of(operation, x, w, geometry)
        expected = (problem.k,) if operation is Operation.FORWARD else problem.y_shape(len(x))
        if x.shape != problem.x_shape(len(x)) or w.shape != problem.w_shape():
            return None
        if third is not None and third.shape != expected:
            return None
        with made_current(x.device):
            return choices.executable(problem, len(x))
    except CapturingError:
        raise  # it is nothing to remember
    except (InvalidInputError, UnavailableError):
        return None


# Repair


def working_executable(
    problem: ConvProblem, configuration: Configuration, device_type: str, *, keeps_workspace: bool = True
) -> Executable | None:
    """Make a configuration ready for the current device: built, with alternatives in the place of failed steps.

    ``None``: torch's own convolution, where the device or torch's settings are not those that it was tuned for, or no
    alternative works. Raises ``InvalidInputError`` for an algorithm that is not registered or cannot compute the
    problem, ``CapturingError`` where a CUDA graph is being captured, ``StepError`` where there is no memory to build.
    """
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CapturingError(f"{problem} was not run before a CUDA graph is captured: run it once, then capture it")
    try:
        executable = Executable.of(problem, configuration, device_type=device_type, keeps_workspace=keeps_workspace)
        reason = _why_not_here(executable)
    except (LibraryError, UnavailableError) as error:
        reason = str(error)
    if reason is not None:
        say_once(f"{problem}: {configuration} cannot run here: {reason}; torch's own convolution runs instead")
        return None
    return _first_that_works(executable, _current_device(device_type))


def note_failure(error: StepError, device: torch.device) -> None:
    """Remember a failure: from now on no executable that ``working_executable`` makes for this device has that step.

    Raises what torch raises where the error has broken the CUDA context: then nothing can run any more.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
    _failed.setdefault((device, error.problem, error.micro_config), str(error))


def _first_that_works(executable: Executable, device: torch.device) -> Executable | None:
    problem, limit_bytes = executable.problem, executable.workspace_bytes
    while (step := _failed_step(executable, device)) is not None:
        failed = _micro_config(*step)
        alternative = next(_alternatives(executable, *step, limit_bytes, device), None)
        runs = "torch's own convolution" if alternative is None else alternative.configuration
        say_once(
            f"{failed.algorithm} failed for {failed.micro_batch_size} sample(s) of {problem}: "
            f"{_failed[device, problem, failed]}; from now on {runs} runs there"
        )
        if alternative is None:
            return None
        executable = alternative
    return executable


def _failed_step(executable: Executable, device: torch.device) -> tuple[Algorithm, int] | None:
    """Find the first step that has failed before, or cannot be built now; ``None`` once all are built."""
    for step in executable.steps:
        key = device, executable.problem, _micro_config(*step)
        if key not in _failed:
            try:
                executable.build_step(*step)
            except StepError as error:
                if error.is_lack_of_memory:
                    raise
                note_failure(error, device)
        if key in _failed:
            return step
    return None


def _alternatives(
    executable: Executable, failed: Algorithm, size: int, limit_bytes: int, device: torch.device
) -> Iterator[Executable]:
    """Make the executable anew with others in the place of the failed step, as far as the workspace goes."""
    problem = executable.problem
    for another in failed.alternatives(problem, size):
        instead = _micro_config(another, size)
        if (device, problem, instead) in _failed:
            continue
        configuration = _with_another(executable.configuration, _micro_config(failed, size), instead)
        try:
            alternative = Executable.of(
                problem, configuration, device_type=device.type, keeps_workspace=executable.keeps_workspace
            )
        except LibraryError:
            continue
        if alternative.workspace_bytes <= limit_bytes:
            yield alternative


def _with_another(configuration: Configuration, failed: MicroConfig, instead: MicroConfig) -> Configuration:
    micro_configs = tuple(instead if m == failed else m for m in configuration.micro_configs)
    return replace(configuration, micro_configs=micro_configs)


def _micro_config(algorithm: Algorithm, size: int) -> MicroConfig:
    return MicroConfig(algorithm.name, size)


def _why_not_here(executable: Executable) -> str | None:
    """Tell why a step may not run now, in words; ``None``: all may."""
    for algorithm, size in executable.steps:
        if reason := algorithm.why_not_here(executable.problem, size):
            return f"{algorithm.name}: {reason}"
    return None


def _current_device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
