"""Choices for convolutions with their reasons, and the executables that run them, which are made on first use."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mucudnn.core.errors import CapturingError, InvalidInputError, LibraryError, UnavailableError, say_once
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.core.values import format_bytes
from mucudnn.kernels.registry import settings_that_bar
from mucudnn.kernels.torch_convolution import Geometry
from mucudnn.running.devices import made_current
from mucudnn.running.eager.hot_path import known_key
from mucudnn.running.executable import Executable, StepError
from mucudnn.running.problems import problem_of_call, torchs_filter_strides

if TYPE_CHECKING:
    pass

ExecutableKey = bytes | tuple[Any, ...]
_EXECUTABLES_CACHED = 4096  # limit per ``Choices``, in case shapes never repeat


class Choices:
    """Configurations chosen on one type of device, one for each problem and batch size. Immutable but for the cache.

    Torch's own convolution runs on other devices and for other problems, and where a configuration cannot run.

    configurations: by problem and batch size.
    batch_invariant: whether batches of all sizes run in micro-batches of the sizes that were chosen for one of them;
        but gradients of filters, which are sums over the batch.
    keeps_workspace: whether the CPU workspace is kept between calls.
    limit_bytes: limit on a kept workspace plus the algorithms' own allocations; None for no limit.
    computes_moments: whether forward convolutions in training compute the moments of y, for the norm that reads it.
    normalizes: the operations that normalize x as they read x, in training, if x is the result of a norm.
    measured: the one executable to run, while it is being timed; then there is no fallback, and errors are raised.

    handle: a digest of the contents, equal in all processes, by which compiled graphs, copies and pickles (which
    register themselves when loaded) find the choices.
    executables: those made so far, by call.
    x_shapes: shapes (N, C, H, W) with a configuration, of all batch sizes if ``batch_invariant``.
    normalizing: executables that normalize x, by the identity of those that do not, and with these.
    beside_torchs: by operation, the limit on a kept workspace while torch's own runs.
    """

    __slots__ = (
        "batch_invariant",
        "beside_torchs",
        "computes_moments",
        "configurations",
        "device_type",
        "executables",
        "handle",
        "keeps_workspace",
        "limit_bytes",
        "measured",
        "normalizes",
        "normalizing",
        "x_shapes",
    )

    def __init__(
        self,
        configurations: Mapping[ConvProblem, Mapping[int, Configuration]],
        device_type: str,
        *,
        batch_invariant: bool = False,
        keeps_workspace: bool = True,
        limit_bytes: int | None = None,
        computes_moments: bool = False,
        normalizes: Iterable[Operation] = (),
        measured: Executable | None = None,
    ) -> None:
        self.configurations = {p: dict(by_size) for p, by_size in configurations.items()}
        self.device_type, self.keeps_workspace, self.limit_bytes = device_type, keeps_workspace, limit_bytes
        self.computes_moments, self.normalizes, self.measured = computes_moments, frozenset(normalizes), measured
        self.executables: dict[ExecutableKey, Executable | None] = {}
        self.normalizing: dict[int, tuple[Executable, Executable | None]] = {}
        rows = [(p, n, chosen) for p, by_size in self.configurations.items() for n, chosen in by_size.items()]
        shapes = (p.x_shape(n) for p, n, _ in rows)
        self.batch_invariant = batch_invariant
        self.x_shapes = _ShapesOfSamples(shape[1:] for shape in shapes) if batch_invariant else frozenset(shapes)
        lines = sorted(f"{p!r} {n} {chosen.micro_configs!r}" for p, n, chosen in rows)
        fused = f"{computes_moments}, {sorted(self.normalizes)}, {batch_invariant}"
        contents = "\n".join((f"{device_type}, {keeps_workspace}, {limit_bytes}, {fused}", *lines))
        digest = hashlib.blake2b(contents.encode(), digest_size=8).digest()
        self.handle = (int.from_bytes(digest, "big") >> 1) or 1  # 63 bits, and never 0, the handle without choices
        self.beside_torchs: dict[Operation, int] = {}
        for p, by_size in self.configurations.items():
            needed = [chosen.workspace_bytes for chosen in by_size.values() if chosen.is_baseline]
            if limit_bytes is not None and needed:
                self.beside_torchs[p.operation] = limit_bytes - max(needed)

    @classmethod
    def of(
        cls,
        configurations: Mapping[ConvProblem, Mapping[int, Configuration]],
        device_type: str = "cpu",
        *,
        batch_invariant: bool = False,
        keeps_workspace: bool = True,
        limit_bytes: int | None = None,
        computes_moments: bool = False,
        normalizes: Iterable[Operation] = (),
    ) -> Choices:
        """Register configurations by problem and batch size; return the ``Choices``, one object for equal contents."""
        choices = cls(
            configurations,
            device_type,
            batch_invariant=batch_invariant,
            keeps_workspace=keeps_workspace,
            limit_bytes=limit_bytes,
            computes_moments=computes_moments,
            normalizes=normalizes,
        )
        return _registered.setdefault(choices.handle, choices)

    def fusing(self, *, computes_moments: bool, normalizes: Iterable[Operation]) -> Choices:
        """Return the same choices with other ``computes_moments`` and ``normalizes``."""
        return Choices.of(
            self.configurations,
            self.device_type,
            batch_invariant=self.batch_invariant,
            keeps_workspace=self.keeps_workspace,
            limit_bytes=self.limit_bytes,
            computes_moments=computes_moments,
            normalizes=normalizes,
        )

    def configuration(self, problem: ConvProblem, n: int) -> Configuration | None:
        """Return what runs for a problem on ``n`` samples; None for torch's own."""
        by_size = self.configurations.get(problem, {})
        if not self.batch_invariant or problem.operation is Operation.BACKWARD_FILTER:
            chosen = by_size.get(n)
            return None if chosen is None or chosen.is_baseline else chosen
        return next((_in_same_sizes(chosen, n) for chosen in by_size.values()), None)

    def __reduce__(self) -> tuple[Any, ...]:
        registered = partial(
            Choices.of,
            batch_invariant=self.batch_invariant,
            keeps_workspace=self.keeps_workspace,
            limit_bytes=self.limit_bytes,
            computes_moments=self.computes_moments,
            normalizes=self.normalizes,
        )
        return registered, (self.configurations, self.device_type)


class _ShapesOfSamples(frozenset[Any]):
    """Shapes without their first size, among which are all shapes that have one of them behind it."""

    __slots__ = ()

    def __contains__(self, shape: Any) -> bool:
        return super().__contains__(tuple(shape[1:]))


def _in_same_sizes(configuration: Configuration, n: int) -> Configuration:
    """Return a configuration of one algorithm for ``n`` samples, in micro-batches of the same sizes, or of one."""
    (name,), micro_configs, left = configuration.algorithms, list[MicroConfig](), n
    for size in sorted({1, *(part.micro_batch_size for part in configuration.micro_configs)}, reverse=True):
        micro_configs += [MicroConfig(name, size)] * (left // size)
        left %= size
    time_s = configuration.time_s * n / configuration.batch_size
    return replace(configuration, micro_configs=tuple(micro_configs), time_s=time_s)


_registered: dict[int, Choices] = {}


def choices_of(handle: int) -> Choices | None:
    """Return the choices with this handle; None if there are none."""
    return _registered.get(handle)


def executable_of(
    choices: Choices, operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, geometry: Geometry
) -> Executable | None:
    """Return the executable of a call; None if torch's own convolution is to run.

    third: bias or dy.

    Torch's own also runs for invalid convolutions, to raise the error, and if an algorithm is missing on this machine.
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
        executable = None
    problem = _problem(operation, x, w, third, geometry) if x.device.type == choices.device_type else None
    if problem is not None:
        try:
            with made_current(x.device):
                executable = make_executable(choices, problem, len(x))
        except CapturingError:
            raise  # do not cache this
        except (InvalidInputError, UnavailableError):
            pass
        if executable is not None and operation is Operation.BACKWARD_FILTER and x.device.type == "cpu":
            executable = executable.with_strides(torchs_filter_strides(problem, x, w, geometry))
    if len(choices.executables) >= _EXECUTABLES_CACHED:
        choices.executables.clear()
    choices.executables[key] = executable
    return executable


def normalizing_executable_of(
    choices: Choices, operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, geometry: Geometry
) -> Executable | None:
    """Return the executable of a call that normalizes x; None if x is to be normalized before."""
    executable = executable_of(choices, operation, x, w, third, geometry) if operation in choices.normalizes else None
    if executable is None:
        return None
    known, normalizing = choices.normalizing.get(id(executable), (None, None))
    if known is not executable:
        normalizing = within_limits(choices, executable)
        choices.normalizing[id(executable)] = executable, normalizing
    return normalizing


def within_limits(choices: Choices, executable: Executable) -> Executable | None:
    """Return an executable of these choices for calls with a prologue; None if there is none or no room for it."""
    normalizing = executable.normalizing() if executable.result.device_type == "cpu" else None
    is_bounded = choices.limit_bytes is not None or not choices.keeps_workspace
    if normalizing is None or not is_bounded:
        return normalizing
    most_bytes = max(executable.buffer_bytes, choices.limit_bytes or 0)
    return normalizing if normalizing.buffer_bytes <= most_bytes else None


def _problem(
    operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, geometry: Geometry
) -> ConvProblem | None:
    """Return the problem of a call of an operator; None if its operands do not fit together."""
    forward = problem_of_call(x, w, *geometry) if x.dim() == w.dim() and x.dim() in (4, 5) else None
    if forward is None or third is None:
        return None if forward is None else forward.with_operation(operation)
    expected = (forward.k,) if operation is Operation.FORWARD else forward.y_shape(len(x))
    is_alike = (third.dtype, third.device, third.layout) == (x.dtype, x.device, x.layout)
    return forward.with_operation(operation) if is_alike and third.shape == expected else None


# Steps that fail: torch's own convolution runs instead from then on

_failed: dict[tuple[torch.device, ConvProblem, MicroConfig], str] = {}  # in this process, with the library's error


def make_executable(choices: Choices, problem: ConvProblem, n: int) -> Executable | None:
    """Return a new executable for a problem on ``n`` samples on the current device, with all its steps built.

    Returns None, for torch's own convolution, if that was chosen, if the device or torch's settings have changed since
    tuning, or if a step cannot be built or has failed before. Raises ``InvalidInputError`` for an algorithm that is not
    registered or cannot compute the problem, ``CapturingError`` while a CUDA graph is captured, and ``StepError`` if
    there is no memory to build it.
    """
    # What is to run, if not torch's own
    if choices.measured is not None:
        return choices.measured if n == choices.measured.configuration.batch_size else None
    configuration, device_type = choices.configuration(problem, n), choices.device_type
    if configuration is None:
        return None
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CapturingError(f"{problem} was not run before a CUDA graph is captured: run it once, then capture it")

    # Whether it may run in the present environment
    try:
        executable = Executable.of(
            problem, configuration, device_type=device_type, keeps_workspace=choices.keeps_workspace
        )
        reasons = ((algorithm.name, algorithm.why_not_here(problem, size)) for algorithm, size in executable.steps())
        reason = next((f"{name}: {why}" for name, why in reasons if why), None)
        most_bytes = max(configuration.workspace_bytes, choices.limit_bytes or 0)
        is_bounded = device_type == "cpu" and (choices.limit_bytes is not None or not choices.keeps_workspace)
        if is_bounded and executable.buffer_bytes > most_bytes:  # buffers grow with the number of threads
            reason = (
                f"with {torch.get_num_threads()} threads its workspace is {format_bytes(executable.buffer_bytes)}, and "
                f"{format_bytes(most_bytes)} are allowed; optimize the model again with as many threads"
            )
    except (LibraryError, UnavailableError) as error:
        reason = str(error)
    if reason is not None:
        say_once(f"{problem}: {configuration} cannot run here: {reason}; torch's own convolution runs instead")
        return None

    # Build its steps, of which none may have failed before
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    for algorithm, size in executable.steps():
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

    # Within a limit, keep less by what the algorithms allocate themselves, which is in the configuration's bytes, and
    # not in the executable's buffers
    if choices.limit_bytes is None:
        return executable
    scratch = min(algorithm.workspace(problem, size).scratch_bytes for algorithm, size in executable.steps())
    handed = scratch + sum(stage.prepared.stop - stage.prepared.start for stage in executable.stages)
    internal_bytes = configuration.workspace_bytes - handed
    within = choices.limit_bytes - internal_bytes
    return replace(executable, most_kept_bytes=within) if internal_bytes > 0 else executable


def note_failure(error: StepError, device: torch.device) -> None:
    """Record a failed step, which ``make_executable`` will no longer use on this device.

    Raises torch's error if the failure has broken the CUDA context, so that nothing can run any more.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
    _failed.setdefault((device, error.problem, error.micro_config), str(error))
