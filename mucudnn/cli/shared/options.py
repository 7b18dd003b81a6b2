"""Options that more than one command has, and the types that read their values."""

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
    """Return one decorator that adds several options, listed by --help in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def batch(default: int | None = None) -> Decorator:
    """Add ``--batch``."""
    return option("batch", Count(), "Samples in a mini-batch.", default)


def rounds(default: int, what: str, least: int = 1) -> Decorator:
    """Add ``--rounds`` with a default; what: is repeated, in words."""
    return option("rounds", Count(least), what, default)


def option(name: str, kind: Any, text: str, default: object = None, variable: str = "") -> Decorator:
    """Return ``--name``, whose text is its help. variable: argument of the command, if it has another name."""
    variable = variable or name.replace("-", "_")
    return click.option(f"--{name}", variable, type=kind, default=default, help=text)


def flag(name: str, text: str, variable: str = "") -> Decorator:
    """Return ``--name``, which is off by default."""
    return click.option(f"--{name}", variable or name.replace("-", "_"), is_flag=True, help=text)


input_shape = option(
    "input", Text("CxHxW", parse_shape), "One sample of your own model, as 3x224x224.", variable="input_shape"
)
dtype = option("dtype", click.Choice(list(ITEM_BYTES)[::-1]), "Of all tensors.", "float32")
memory_format = option(
    "memory-format", choice(MemoryFormat), "How activations and filters lie in memory.", "contiguous"
)
memory_formats = option(
    "memory-format", several(MemoryFormat), "Which memory formats.", "contiguous,channels-last", "memory_formats"
)
operations = option("operations", several(Operation), "Which operations.", "forward,backward-data,backward-filter")
database = option("database", InputFile(), "SQLite file of the measurements; default: in your cache folder.")


def use_threads(threads: int | None) -> None:
    """Let PyTorch compute with so many threads; ``None``: as many as it takes by itself."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _with_threads(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def with_threads(*args: Any, threads: int | None, **rest: Any) -> Any:
        use_threads(threads)
        return function(*args, **rest)

    return with_threads


known_threads = option("threads", Count(most=MOST_THREADS), "CPU threads; default: what PyTorch uses.")
threads = together(known_threads, _with_threads)
"""They are set before the command runs."""


def _made_current(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the command the type of the device alone."""

    @wraps(function)
    def on_device(*args: Any, device: str, **rest: Any) -> Any:
        if ":" not in device:
            return function(*args, device=device, **rest)
        from mucudnn.running.devices import device_named, made_current  # here and not above: it loads torch

        place = device_named(device)
        with made_current(place):
            return function(*args, device=place.type, **rest)

    return on_device


known_device = option(
    "device",
    Text("TEXT", parse_device),
    "Where to run: cpu, cuda (the current GPU), or a GPU by its number, cuda:1.",
    "cpu",
)
device = together(known_device, _made_current)
"""A GPU by its number is the current one while the command runs."""


def filters(option: str, default: str) -> Decorator:
    """Add an option that keeps only layers with filters of some sizes."""
    return click.option(
        option,
        "filters",
        type=Text("RxS,...", parse_filters),
        default=default,
        help="Only the layers with a filter of these sizes, or all.",
    )


layer_of_source = click.option(
    "--layer", "layer_name", metavar="NAME", help="Of SOURCE's layers; mucudnn layers SOURCE lists them."
)
devices = option(
    "devices",
    Text("TEXT,...", lambda text: tuple(parse_device(part.strip()) for part in text.split(","))),
    "Several instead, as cuda:0,cuda:1: each measures a part, in a process of its own.",
    (),
)
policy = option("policy", choice(BatchSizePolicy), "Micro-batch sizes that are measured.", "power-of-two")
algorithms = option(
    "algorithms",
    Text("NAME,...", parse_names),
    "Choose from these only (mucudnn doctor lists them); PyTorch's own is always a candidate.",
)
max_relative_error = option(
    "max-relative-error",
    Finite(min=LEAST_MAX_RELATIVE_ERROR),
    "Bar algorithms whose relative L2 error against float64 is above this; default: by dtype, 1e-5 in float32.",
)
environment = option(
    "environment",
    Text("TEXT|NUMBER", str),
    "Where it was measured, if there are several: part of the description, or its number in the list.",
)
deterministic = flag("deterministic", "Only algorithms that give the same bits on every run.")
strict = flag("strict", "Only algorithms with which NaN and infinities spread no further than with PyTorch.")
thorough = flag("thorough", "Measure every candidate that is not surely slower: minutes instead of seconds.")
confirm = click.option(
    "--confirm/--no-confirm",
    default=None,
    help="End tuning with interleaved steps, and put PyTorch's own back where ours is slower. Default: if short.",
)
_time = Text("TIME", checked_by(parse_time_limit))
time_limit = option("time-limit", _time, "Most measuring per problem, as 60s or 2min.")
run_time_limit = option(
    "run-time-limit",
    Text("TIME", parse_seconds),
    "Of the whole run, as 10min: begin nothing that would not be done by then. Default: everything.",
)
first_call_time = option(
    "first-call-time",
    _time,
    "With --how enable: most measuring of a problem that is met, as 60s, or none: no bound but --time-limit.",
    Config().first_call_time,
)
background = flag("background", "With --how enable: measure between steps, not in the call that meets a problem.")
limits_torch = click.option(
    "--limit-torch/--no-limit-torch",
    "limits_torch",
    default=None,
    help="Whether the limit holds PyTorch's own convolution, too, so that something slower runs where it needs more. "
    f"Default: yes, but for a limit of {DEFAULT_WORKSPACE_LIMIT}.",
)
share_tuning = click.option(
    "--share-tuning/--no-share-tuning",
    default=True,
    help="Under torchrun: whether the ranks tune together, or each for itself; rank 0 tells.",
)


def _limit(text: str) -> str:
    if text == HEADROOM:
        raise InvalidInputError(
            f"{HEADROOM} is free memory in a training step, and this command runs none; give a size, such as 64MiB, or "
            "none (mucudnn tune, solve and bench memory know the headroom)"
        )
    return checked_by(parse_bytes)(text)


def _limit_or_headroom(text: str) -> str:
    return text if text == HEADROOM else _limit(text)


def workspace_limit(default: str, headroom: bool = False) -> Decorator:
    """Add ``--workspace-limit``. headroom: whether it may be that, too."""
    return option(
        "workspace-limit",
        Text("SIZE", _limit_or_headroom if headroom else _limit),
        "Most memory that any one operation may take beside its tensors: as 64MiB, none"
        + (", or headroom: what is free below the peak of a training step." if headroom else ".")
        + " The right bound where calls run one after another: they share one buffer.",
        default,
    )


def memory_bounds(default: str, headroom: bool = False) -> Decorator:
    """Add ``--workspace-limit``, with this default, ``--limit-torch``, and ``--workspace-budget`` instead of both."""
    budget = option(
        "workspace-budget",
        Text("SIZE", parse_size),
        "Instead of a limit for each: most memory of all operations in sum, divided as it saves most time. "
        "The right bound where calls overlap, in threads or streams.",
    )
    return together(workspace_limit(default, headroom), limits_torch, budget)


def is_given(name: str) -> bool:
    """Whether the parameter of the running command is not at its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def bundled(name: str, make: Callable[..., Any], *options: Decorator) -> Decorator:
    """Add options whose values a command gets as one argument: what ``make`` returns for them."""

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
    """Add options that have the names of a ``Config``'s fields; the command gets ``config``. fixed: other fields."""
    return bundled("config", lambda **given: _config(**{**given, **fixed}), *options)


def _config(**values: Any) -> Config:
    """Refuse a limit, and what it holds, beside a budget; the default limit does not count."""
    if values.get("workspace_budget") is not None:
        if is_given("workspace_limit"):
            raise click.UsageError(
                "a budget is divided instead of a limit for each: give --workspace-limit or --workspace-budget, not "
                "both"
            )
        if values.pop("limits_torch") is not None:
            raise click.UsageError(
                "a budget holds PyTorch's own convolution in any case: give --limit-torch or --no-limit-torch beside a "
                "--workspace-limit only"
            )
        del values["workspace_limit"]
    return Config(**values)


SOLVING = (policy, operations, algorithms, max_relative_error, strict)
"""Options of a ``Config`` for what is stored."""
MEASURING = (policy, operations, algorithms, max_relative_error, deterministic, strict, thorough, time_limit, database)
"""Options of a ``Config`` that do not bound its workspace."""

IN_STEPS = (confirm, first_call_time, background)
"""Options of a ``Config`` for steps of a whole model."""

source_argument = click.argument("source", type=SOURCE)
source = together(source_argument, batch(), input_shape)
"""Options that say where the convolutions come from."""
