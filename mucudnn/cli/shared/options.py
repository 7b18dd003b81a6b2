"""Command-line options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from click.core import ParameterSource

from mucudnn.cli.shared.commands import Outputs
from mucudnn.cli.shared.parameters import (
    COUNTS,
    FOLDER,
    INPUT_FILE,
    MOST_THREADS,
    SOURCE,
    OpenFlag,
    OutputFile,
    Text,
    choice,
    count,
    parse_device,
    parse_shape,
    several,
)
from mucudnn.core.config import HEADROOM, SETTINGS, Check, Config, from_text, in_words, or_word, variables
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ITEM_BYTES, MemoryFormat
from mucudnn.core.values import parse_seconds

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
    return option("batch", count(), "Samples in a mini-batch.", default)


def batch_sizes(default: str) -> Decorator:
    """Return a decorator that adds the option ``--batch`` to a command of several sources.

    default: in words.
    """
    text = f"Samples in a mini-batch, one size for all sources or one for each, such as 16,8; default: {default}."
    return option("batch", COUNTS, text, variable="batch_sizes")


def rounds(default: int, text: str) -> Decorator:
    """Return a decorator that adds the option ``--rounds`` to a command, with this help."""
    return option("rounds", count(), text, default)


def option(name: str, kind: Any, text: str, default: object = None, variable: str = "") -> Decorator:
    """Return a decorator that adds the option ``--name`` to a command.

    text: help of the option.
    variable: name of the command's argument, if it differs from the option's.
    """
    variable = variable or name.replace("-", "_")
    return click.option(f"--{name}", variable, type=kind, default=default, help=text)


def flag(name: str, text: str, variable: str = "") -> Decorator:
    """Return a decorator that adds the flag ``--name``, which is off by default, with this help."""
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


def use_threads(threads: int | None) -> None:
    """Set PyTorch's number of threads; None leaves it unchanged."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _with_threads(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def with_threads(*args: Any, threads: int | None, **values: Any) -> Any:
        use_threads(threads)
        return function(*args, **values)

    return with_threads


known_threads = option("threads", count(most=MOST_THREADS), "CPU threads; default: PyTorch's own number.")
threads = together(known_threads, _with_threads)
"""Sets the number of threads before the command runs."""


def _made_current(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that makes a numbered GPU such as cuda:1 current, then calls ``function`` with cuda."""

    @wraps(function)
    def on_device(*args: Any, device: str, **values: Any) -> Any:
        if ":" not in device:
            return function(*args, device=device, **values)
        from mucudnn.running.devices import device_named, made_current  # imported here, since it loads torch

        place = device_named(device)
        with made_current(place):
            return function(*args, device=place.type, **values)

    return on_device


known_device = option(
    "device",
    Text("TEXT", parse_device),
    "Where to run: cpu, cuda (the current GPU), or a GPU by number, such as cuda:1.",
    "cpu",
)
device = together(known_device, _made_current)
"""Makes a GPU given by number the current one while the command runs."""


layer_of_source = click.option(
    "--layer", "layer_name", metavar="NAME", help="Layer of SOURCE; mucudnn layers SOURCE lists them."
)
environment = option(
    "environment",
    Text("TEXT|NUMBER", str),
    "Environment of the measurements, if there are several: part of its description, or its number in the list.",
)
_time_or_none = or_word(lambda text, _: parse_seconds(text), "none")
run_time_limit = option(
    "run-time-limit",
    Text("TIME", lambda text: _time_or_none(text, "run-time-limit")),
    "Time limit of the whole run, such as 10min, or none: skip rows that would end after it.",
    "none",
)


def setting(name: str, default: object = ..., check: Check | None = None, remark: str = "") -> Decorator:
    """Return a decorator that adds the option of a field of ``Config``.

    default: replaces the field's own.
    check: replaces the field's own.
    remark: text at the end of the option's help.
    """
    metadata = SETTINGS[name].metadata
    checked, metavar, text = check or metadata["check"], metadata["metavar"], f"{metadata['text']}{remark}"
    if default is ...:
        default = in_words(Config())[name]
    spelled = name.replace("_", "-")
    if metavar == "FILE":
        return option(spelled, INPUT_FILE, text, default, name)
    if metavar:
        return option(spelled, Text(metavar, lambda value: checked(from_text(name, value), name)), text, default, name)
    if default is False:
        return flag(spelled, text, name)
    is_open = metadata["word"] == default
    return click.option(
        f"--{spelled}/--no-{spelled}", name, type=OpenFlag(), default=None if is_open else default, help=text
    )


def _no_headroom(value: Any, name: str) -> Any:
    if value == HEADROOM:
        raise InvalidInputError(
            f"{HEADROOM} is free memory in a training step, and this command runs none; give a size, such as 64MiB, or "
            "none (mucudnn tune and bench training support the headroom)"
        )
    return SETTINGS[name].metadata["check"](value, name)


limit_or_headroom = setting("workspace_limit", remark=" headroom: the memory free below the peak of a training step.")


def workspace_limit(default: str) -> Decorator:
    """Return a decorator that adds ``--workspace-limit`` to a command that runs no training step."""
    return setting("workspace_limit", default, _no_headroom)


def is_given(name: str) -> bool:
    """Whether the user gave this parameter on the command line; a variable of the environment is for all commands."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def bundled(name: str, make: Callable[..., Any], *options: Decorator) -> Decorator:
    """Return a decorator that adds options whose values are bundled into one argument of the command, ``name``.

    The argument is the result of calling ``make`` with the values by name.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def gathering(*args: Any, **values: Any) -> Any:
            bundle = make(**{key: values.pop(key) for key in keys})
            return function(*args, **values, **{name: bundle})

        before = len(getattr(function, "__click_params__", ()))
        decorated = together(*options)(gathering)
        keys = [param.name for param in decorated.__click_params__[before:]]  # type: ignore[attr-defined]
        return decorated

    return decorate


def outputs(*kinds: str) -> Decorator:
    """Return a decorator that adds some of the options ``--csv``, ``--json`` and ``--out`` to a command.

    kinds: the options. The command gets their values as one argument, ``outputs``.
    """
    options: dict[str, Decorator] = {
        "csv": option("csv", OutputFile(), "Also write the numbers to this CSV file.", variable="csv_file"),
        "json": option("json", OutputFile(), "Also write the results to this JSON file.", variable="json_file"),
        "out": click.option(
            "--out",
            type=FOLDER,
            help="Keep all samples in this result folder. Run the same command again to resume.",
        ),
    }
    return bundled("outputs", Outputs, *(options[kind] for kind in kinds))


def config(*settings: Decorator | str, **fixed: Any) -> Decorator:
    """Return a decorator that adds options of fields of ``Config``, by name or as decorators, to a command.

    The command gets their values as one argument, ``config``. Settings of measuring that are neither options nor fixed
    have the values of their variables, such as ``MUCUDNN_STRICT``.

    fixed: values of other fields.
    """

    def make(**options: Any) -> Config:
        values = {**options, **fixed}
        if values.get("workspace_budget") is not None:
            if is_given("workspace_limit"):
                raise click.UsageError("--workspace-limit and --workspace-budget exclude each other: give one of them")
            del values["workspace_limit"]
        measuring = {name: value for name, value in variables(os.environ).items() if name in (*MEASURING, "keep_heap")}
        return Config(**{**measuring, **values})

    return bundled("config", make, *(setting(name) if isinstance(name, str) else name for name in settings))


MEASURING = (
    *("policy", "operations", "algorithms", "max_relative_error", "strict"),
    *("deterministic", "time_limit", "database"),
)
"""Fields of a ``Config`` for measuring, without those of the workspace."""

operations, database = setting("operations"), setting("database")

source_argument = click.argument("source", type=SOURCE)
source = together(source_argument, batch(), input_shape)
"""Options that select the convolutions."""
