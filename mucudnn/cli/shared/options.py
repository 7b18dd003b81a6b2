"""Command-line options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from click.core import ParameterSource

from mucudnn.cli.shared.parameters import (
    MOST_THREADS,
    Count,
    Finite,
    Text,
    checked_by,
    choice,
    parse_device,
    parse_filters,
    parse_names,
    parse_shape,
    parse_size,
    several,
)
from mucudnn.terminal.files import SOURCE, InputFile
from mucudnn.words.config import DEFAULT_WORKSPACE_LIMIT, HEADROOM, LEAST_MAX_RELATIVE_ERROR, BatchSizePolicy, Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ITEM_BYTES, MemoryFormat, Operation
from mucudnn.words.units import parse_bytes, parse_seconds, parse_time_limit

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*options: Decorator) -> Decorator:
    """Return one decorator that adds several options to a command, in the order in which --help lists them."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def batch(default: int | None = None) -> Decorator:
    """Return a decorator that adds the option ``--batch`` to a command."""
    return option("batch", Count(), "Samples in a mini-batch.", default)


def rounds(default: int, what: str, least: int = 1) -> Decorator:
    """Return a decorator that adds the option ``--rounds`` to a command. what: help text of the option."""
    return option("rounds", Count(least), what, default)


def option(name: str, kind: Any, text: str, default: object = None, variable: str = "") -> Decorator:
    """Return a decorator that adds the option ``--name`` to a command.

    text: help of the option. variable: name of the command's argument, if not that of the option.
    """
    variable = variable or name.replace("-", "_")
    return click.option(f"--{name}", variable, type=kind, default=default, help=text)


def flag(name: str, text: str, variable: str = "") -> Decorator:
    """Return a decorator that adds the flag ``--name``, which is off by default. text: help of the flag."""
    return click.option(f"--{name}", variable or name.replace("-", "_"), is_flag=True, help=text)


input_shape = option(
    "input",
    Text("CxHxW", parse_shape),
    "Shape of one sample for your own model, as 3x224x224.",
    variable="input_shape",
)
dtype = option("dtype", click.Choice(list(ITEM_BYTES)[::-1]), "Data type of all tensors.", "float32")
memory_format = option("memory-format", choice(MemoryFormat), "Memory format of activations and filters.", "contiguous")
memory_formats = option(
    "memory-format", several(MemoryFormat), "Memory formats to compare.", "contiguous,channels-last", "memory_formats"
)
operations = option("operations", several(Operation), "Operations to use.", "forward,backward-data,backward-filter")
database = option("database", InputFile(), "SQLite file of the measurements; default: in your cache folder.")


def use_threads(threads: int | None) -> None:
    """Set PyTorch's number of threads; None leaves it unchanged."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _with_threads(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def with_threads(*args: Any, threads: int | None, **rest: Any) -> Any:
        use_threads(threads)
        return function(*args, **rest)

    return with_threads


known_threads = option("threads", Count(most=MOST_THREADS), "CPU threads; default: PyTorch's own number.")
threads = together(known_threads, _with_threads)
"""Sets the number of threads before the command runs."""


def _made_current(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that makes a numbered GPU, such as cuda:1, current, then calls ``function`` with cuda."""

    @wraps(function)
    def on_device(*args: Any, device: str, **rest: Any) -> Any:
        if ":" not in device:
            return function(*args, device=device, **rest)
        from mucudnn.running.devices import device_named, made_current  # imported here, since it loads torch

        place = device_named(device)
        with made_current(place):
            return function(*args, device=place.type, **rest)

    return on_device


known_device = option(
    "device",
    Text("TEXT", parse_device),
    "Where to run: cpu, cuda (the current GPU), or a GPU by number, such as cuda:1.",
    "cpu",
)
device = together(known_device, _made_current)
"""Makes a GPU given by number the current one while the command runs."""


def filters(option: str, default: str) -> Decorator:
    """Return a decorator that adds an option to keep only layers whose filters have certain sizes."""
    return click.option(
        option,
        "filters",
        type=Text("RxS,...", parse_filters),
        default=default,
        help="Use only layers with filters of these sizes, or all.",
    )


layer_of_source = click.option(
    "--layer", "layer_name", metavar="NAME", help="Layer of SOURCE; mucudnn layers SOURCE lists them."
)
devices = option(
    "devices",
    Text("TEXT,...", lambda text: tuple(parse_device(part.strip()) for part in text.split(","))),
    "Several devices, such as cuda:0,cuda:1: each measures a part, in a separate process.",
    (),
)
policy = option("policy", choice(BatchSizePolicy), "Micro-batch sizes to measure.", "power-of-two")
algorithms = option(
    "algorithms",
    Text("NAME,...", parse_names),
    "Choose only from these (mucudnn doctor lists them); PyTorch's own is always a candidate.",
)
max_relative_error = option(
    "max-relative-error",
    Finite(min=LEAST_MAX_RELATIVE_ERROR),
    "Exclude algorithms with a larger relative L2 error against float64; default: by dtype, 1e-5 for float32.",
)
environment = option(
    "environment",
    Text("TEXT|NUMBER", str),
    "Environment of the measurements, if there are several: part of its description, or its number in the list.",
)
deterministic = flag("deterministic", "Use only algorithms that give the same bits on every run.")
strict = flag("strict", "Use only algorithms with which NaN and infinities spread no further than with PyTorch.")
thorough = flag("thorough", "Measure every candidate that may win: minutes instead of seconds.")
confirm = click.option(
    "--confirm/--no-confirm",
    default=None,
    help="After tuning, time steps interleaved with PyTorch's, and restore PyTorch's where faster. Default: if short.",
)
_time = Text("TIME", checked_by(parse_time_limit))
time_limit = option("time-limit", _time, "Most time to measure one problem, such as 60s or 2min.")
run_time_limit = option(
    "run-time-limit",
    Text("TIME", parse_seconds),
    "Time limit of the whole run, such as 10min: skip rows that would end after it. Default: measure all.",
)
first_call_time = option(
    "first-call-time",
    _time,
    "With --how enable: most time to measure a problem when it first occurs, such as 60s; none: only --time-limit.",
    Config().first_call_time,
)
background = flag("background", "With --how enable: measure between steps, not in a problem's first call.")
limits_torch = click.option(
    "--limit-torch/--no-limit-torch",
    "limits_torch",
    default=None,
    help="Whether the limit applies to PyTorch's own convolution too, so that a slower algorithm may replace it. "
    f"Default: yes, except for a limit of {DEFAULT_WORKSPACE_LIMIT}.",
)
share_tuning = click.option(
    "--share-tuning/--no-share-tuning",
    default=True,
    help="Under torchrun: whether the ranks tune together, or each for itself; rank 0 prints the result.",
)


def _limit(text: str) -> str:
    if text == HEADROOM:
        raise InvalidInputError(
            f"{HEADROOM} is free memory in a training step, and this command runs none; give a size, such as 64MiB, or "
            "none (mucudnn tune, solve and bench memory support the headroom)"
        )
    return checked_by(parse_bytes)(text)


def _limit_or_headroom(text: str) -> str:
    return text if text == HEADROOM else _limit(text)


def workspace_limit(default: str, headroom: bool = False) -> Decorator:
    """Return a decorator that adds ``--workspace-limit``. headroom: whether the value ``headroom`` is allowed."""
    return option(
        "workspace-limit",
        Text("SIZE", _limit_or_headroom if headroom else _limit),
        "Largest workspace of any one operation: a size such as 64MiB, or none"
        + (", or headroom: the memory free below the peak of a training step." if headroom else ".")
        + " The right limit if calls run one after another, since they share one buffer.",
        default,
    )


def memory_bounds(default: str, headroom: bool = False) -> Decorator:
    """Return a decorator that adds ``--workspace-limit``, ``--limit-torch`` and ``--workspace-budget``.

    A budget replaces the other two. default: the limit. headroom: whether the limit ``headroom`` is allowed.
    """
    budget = option(
        "workspace-budget",
        Text("SIZE", parse_size),
        "In place of a limit for each operation: workspace of all together, divided to save the most time. "
        "The right limit if calls overlap, in threads or streams.",
    )
    return together(workspace_limit(default, headroom), limits_torch, budget)


def is_given(name: str) -> bool:
    """Whether the user gave this parameter of the running command, instead of leaving its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def bundled(name: str, make: Callable[..., Any], *options: Decorator) -> Decorator:
    """Return a decorator that adds options whose values are bundled into one argument of the command, ``name``.

    The argument is the result of calling ``make`` with the values by name.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def gathering(*args: Any, **given: Any) -> Any:
            values = {key: given.pop(key) for key in keys}
            return function(*args, **given, **{name: make(**values)})

        before = len(getattr(function, "__click_params__", ()))
        decorated = together(*options)(gathering)
        keys = [param.name for param in decorated.__click_params__[before:]]  # type: ignore[attr-defined]
        return decorated

    return decorate


def config(*options: Decorator, **fixed: Any) -> Decorator:
    """Return a decorator that adds options, named as fields of ``Config``, to a command.

    The command gets their values as one argument, ``config``. fixed: values of other fields.
    """
    return bundled("config", lambda **given: _config(**{**given, **fixed}), *options)


def _config(**values: Any) -> Config:
    """Return the ``Config`` of these values; refuse a limit, or an option of a limit, given beside a budget."""
    if values.get("workspace_budget") is not None:
        if is_given("workspace_limit"):
            raise click.UsageError("--workspace-limit and --workspace-budget exclude each other: give one of them")
        if values.pop("limits_torch") is not None:
            raise click.UsageError(
                "a budget always applies to PyTorch's own convolution too: give --limit-torch or --no-limit-torch with "
                "--workspace-limit only"
            )
        del values["workspace_limit"]
    return Config(**values)


SOLVING = (policy, operations, algorithms, max_relative_error, strict)
"""Options of a ``Config`` for solving from stored measurements."""
MEASURING = (policy, operations, algorithms, max_relative_error, deterministic, strict, thorough, time_limit, database)
"""Options of a ``Config`` for measuring, without those of the workspace."""

IN_STEPS = (confirm, first_call_time, background)
"""Options of a ``Config`` for steps of a whole model."""

source_argument = click.argument("source", type=SOURCE)
source = together(source_argument, batch(), input_shape)
"""Options that select the convolutions."""
