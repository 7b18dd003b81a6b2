"""Chosen configurations of tuned convolutions, and their executables, which are made on first use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mucudnn.core.errors import CapturingError, InvalidInputError, LibraryError, UnavailableError, say_once
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.registry import settings_that_bar
from mucudnn.kernels.torch_convolution import Geometry
from mucudnn.running.devices import made_current
from mucudnn.running.eager.hot_path import known_key
from mucudnn.running.executable import Executable, StepError
from mucudnn.running.problems import DTYPE_NAMES, problem_of, torchs_filter_strides

UNTUNED = 0  # handle without choices
ExecutableKey = bytes | tuple[Any, ...]
_EXECUTABLES_CACHED = 4096  # limit per ``Choices``, in case shapes never repeat


class Choices:
    """Configurations chosen on one type of device, one for each problem and batch size.

    Immutable; made by ``Choices.of``. Torch's own convolution runs on other devices and for other problems.

    handle: a digest of the contents, equal in all processes, by which compiled graphs, copies and pickles (which
    register themselves when loaded) find the choices. x_shapes: shapes (N, C, H, W) with a configuration.
    keeps_workspace: whether the CPU workspace is kept between calls. limit_bytes: limit on a kept workspace plus the
    algorithms' own allocations; None for no limit. beside_torchs: by operation, the limit on a kept workspace while
    torch's own runs.
    """

    __slots__ = (
        "beside_torchs",
        "configurations",
        "device_type",
        "executables",
        "handle",
        "keeps_workspace",
        "limit_bytes",
        "x_shapes",
    )

    def __init__(
        self,
        configurations: Mapping[ConvProblem, Mapping[int, Configuration]],
        device_type: str,
        keeps_workspace: bool,
        limit_bytes: int | None = None,
    ) -> None:
        self.configurations = {p: dict(by_size) for p, by_size in configurations.items()}
        self.device_type, self.keeps_workspace, self.limit_bytes = device_type, keeps_workspace, limit_bytes
        self.handle = _digest(self.configurations, f"{device_type}, {keeps_workspace}, {limit_bytes}")
        self.beside_torchs: dict[Operation, int] = {}
        for problem, by_size in self.configurations.items():
            needed = [chosen.workspace_bytes for chosen in by_size.values() if chosen.is_baseline]
            if limit_bytes is not None and needed:
                self.beside_torchs[problem.operation] = limit_bytes - max(needed)
        self.x_shapes = frozenset(p.x_shape(n) for p, by_size in self.configurations.items() for n in by_size)
        self.executables: dict[ExecutableKey, Executable | None] = {}

    @classmethod
    def of(
        cls,
        configurations: Mapping[ConvProblem, Mapping[int, Configuration]],
        device_type: str = "cpu",
        keeps_workspace: bool = True,
        limit_bytes: int | None = None,
    ) -> Choices:
        """Register configurations by problem and batch size; return the ``Choices``, one object for equal contents."""
        choices = cls(configurations, device_type, keeps_workspace, limit_bytes)
        return _registered.setdefault(choices.handle, choices)

    def __reduce__(self) -> tuple[Any, ...]:
        return Choices.of, (self.configurations, self.device_type, self.keeps_workspace, self.limit_bytes)

    def configuration(self, problem: ConvProblem, n: int) -> Configuration | None:
        """Look up the configuration for a problem on ``n`` samples; None if torch's own convolution is to run."""
        chosen = self.configurations.get(problem, {}).get(n)
        return None if chosen is None or chosen.is_baseline else chosen

    def executable(self, problem: ConvProblem, n: int) -> Executable | None:
        """Return a new executable for a problem on ``n`` samples on the current device; None if torch's own is to run.

        Raises the errors of ``working_executable``.
        """
        configuration = self.configuration(problem, n)
        if configuration is None:
            return None
        executable = working_executable(problem, configuration, self.device_type, keeps_workspace=self.keeps_workspace)
        return executable if executable is None or self.limit_bytes is None else _within(self.limit_bytes, executable)


def _within(limit_bytes: int, executable: Executable) -> Executable:
    """Return a copy of the executable that keeps its kept workspace plus its own allocations within the limit."""
    scratch = min(algorithm.workspace(executable.problem, n).scratch_bytes for algorithm, n in executable.steps)
    handed = scratch + sum(stage.prepared.stop - stage.prepared.start for stage in executable.stages)
    internal_bytes = executable.configuration.workspace_bytes - handed
    return replace(executable, most_kept_bytes=limit_bytes - internal_bytes) if internal_bytes > 0 else executable


_registered: dict[int, Choices] = {}


def choices_of(handle: int) -> Choices | Measured | None:
    """Return the choices with this handle; None if there are none. Raises ``KeyError`` for a deleted ``Measured``."""
    return _registered.get(handle) if handle >= UNTUNED else _measured[handle]


class Measured:
    """One configuration that is being timed, registered under its own handle. There is no fallback: errors are raised.

    The handle, by which operators find the object, is negative, unlike those of choices, and is released with the
    object. The constructor raises the errors that occur while the executable is prepared.
    """

    def __init__(
        self, problem: ConvProblem, configuration: Configuration, device_type: str, keeps_workspace: bool
    ) -> None:
        self.device_type, self.handle = device_type, -next(_numbers)
        self.executables: dict[ExecutableKey, Executable | None] = {}
        self._executable = Executable.of(
            problem, configuration, device_type=device_type, keeps_workspace=keeps_workspace
        )
        self._executable.build()
        _measured[self.handle] = self

    def executable(self, problem: ConvProblem, n: int) -> Executable | None:
        """Return the executable of the timed configuration; None for another number of samples."""
        return self._executable if n == self._executable.configuration.batch_size else None


_measured: WeakValueDictionary[int, Measured] = WeakValueDictionary()
_numbers = count(1)


def _digest(configurations: Mapping[ConvProblem, Mapping[int, Configuration]], how: str) -> int:
    """Return a 63-bit hash of configurations and settings, which is never ``UNTUNED``."""
    lines = sorted(
        f"{p!r} {n} {c.micro_configs!r}" for p, by_size in configurations.items() for n, c in by_size.items()
    )
    digest = hashlib.blake2b("\n".join((how, *lines)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 1) or 1


def executable_of(
    choices: Choices | Measured, operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, geometry: Geometry
) -> Executable | None:
    """Return the executable of a call; None if torch's own convolution is to run. third: bias or dy.

    The executable is made on first use and cached under a key of everything that affects the choice. Calls for which
    the C++ extension has no key get a tuple.

    Raises ``CapturingError`` if an executable would have to be made while a CUDA graph is captured, and ``StepError``
    if there is no memory to make it.
    """
    *pairs, groups = geometry
    key = known_key(operation, x, w, third, *geometry) or (
        *(operation, *map(tuple, pairs), groups),
        *(x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device),
        None if third is None else (third.shape, third.dtype, third.device),
        settings_that_bar() if x.is_cuda else torch.get_num_threads(),
    )
    try:
        return choices.executables[key]
    except KeyError:
        executable = _resolve(choices, operation, x, w, third, geometry)
    if len(choices.executables) >= _EXECUTABLES_CACHED:
        choices.executables.clear()
    choices.executables[key] = executable
    return executable


def forget(choices: Choices | Measured, executable: Executable | None) -> None:
    """Remove an executable from the cache of ``choices``, so that the next call makes a new one."""
    for key, cached in list(choices.executables.items()):
        if cached is executable:
            choices.executables.pop(key, None)


def _resolve(
    choices: Choices | Measured, operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, geometry: Geometry
) -> Executable | None:
    """Return a new executable for a call; None if torch's own is to run.

    Torch's own also runs for invalid convolutions, to raise the error, and if an algorithm is missing on this machine.
    """
    tensors = [tensor for tensor in (x, w, third) if tensor is not None]
    alike = {(tensor.dtype, tensor.device, tensor.layout) for tensor in tensors} == {(x.dtype, x.device, torch.strided)}
    if not alike or x.dtype not in DTYPE_NAMES or x.device.type != choices.device_type:
        return None
    stride, padding, dilation, groups = geometry
    if x.dim() != 4 or w.dim() != 4 or len(x) == 0 or groups < 1:
        return None
    pairs = ((stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1]), groups)
    try:
        problem = problem_of(operation, x, w, pairs)
        expected = (problem.k,) if operation is Operation.FORWARD else problem.y_shape(len(x))
        if x.shape != problem.x_shape(len(x)) or w.shape != problem.w_shape():
            return None
        if third is not None and third.shape != expected:
            return None
        with made_current(x.device):
            executable = choices.executable(problem, len(x))
        if executable is not None and operation is Operation.BACKWARD_FILTER and x.device.type == "cpu":
            return executable.with_strides(torchs_filter_strides(problem, x, w, pairs))
        return executable
    except CapturingError:
        raise  # do not cache this
    except (InvalidInputError, UnavailableError):
        return None


# Steps that fail: torch's own convolution runs instead from then on

_failed: dict[tuple[torch.device, ConvProblem, MicroConfig], str] = {}  # in this process, with the library's error


def working_executable(
    problem: ConvProblem, configuration: Configuration, device_type: str, *, keeps_workspace: bool = True
) -> Executable | None:
    """Build the executable of a configuration for the current device.

    Returns None, for torch's own convolution, if the device or torch's settings have changed since tuning, or if a step
    cannot be built or has failed before. Raises ``InvalidInputError`` for an algorithm that is not registered or cannot
    compute the problem, ``CapturingError`` while a CUDA graph is captured, and ``StepError`` if there is no memory to
    build it.
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
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    for algorithm, size in executable.steps:
        step = device, problem, MicroConfig(algorithm.name, size)
        if step not in _failed:
            try:
                executable.build_step(algorithm, size)
                continue
            except StepError as error:
                if error.is_lack_of_memory:
                    raise
                note_failure(error, device)
        say_once(
            f"{algorithm.name} failed for {size} sample(s) of {problem}: {_failed[step]}; from now on torch's own "
            "convolution runs there"
        )
        return None
    return executable


def note_failure(error: StepError, device: torch.device) -> None:
    """Record a failed step, which ``working_executable`` will no longer use on this device.

    Raises torch's error if the failure has broken the CUDA context, so that nothing can run any more.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
    _failed.setdefault((device, error.problem, error.micro_config), str(error))


def _why_not_here(executable: Executable) -> str | None:
    """Return the reason why a step of the executable may not run on this machine now; None if all may run."""
    for algorithm, size in executable.steps:
        if reason := algorithm.why_not_here(executable.problem, size):
            return f"{algorithm.name}: {reason}"
    return None
