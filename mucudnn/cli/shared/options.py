"""Options that more than one command has, and the types that read their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from functools import partial, wraps
from math import isfinite
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from mucudnn.running.environment import require_known
from mucudnn.terminal.files import SOURCE, InputFile
from mucudnn.words.config import DEFAULT_WORKSPACE_LIMIT, HEADROOM, LEAST_MAX_RELATIVE_ERROR, BatchSizePolicy, Config
from mucudnn.words.errors import InvalidInputError, MucudnnError
from mucudnn.words.problem import ITEM_BYTES, MemoryFormat, Operation
from mucudnn.words.units import parse_bytes, parse_time_limit

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
_Choice = TypeVar("_Choice", bound=StrEnum)
LARGEST = 2**31 - 1  # number that libraries in C take
MOST_SOLVED = 65536  # batch sizes, each of which is solved
SIZE = "[1-9][0-9]{0,8}"  # a regular expression: from 1, and within LARGEST
MOST_THREADS = 1024  # with very many more, OpenMP ends the process for want of memory


class Text(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A value that a function makes of the text; ``shown`` stands for it in --help.

    The function's ``MucudnnError`` becomes a usage error, which names the option. Defaults are taken as they are.
    """

    def __init__(self, shown: str, parse: Callable[[str], object]) -> None:
        self.name = shown
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value) if isinstance(value, str) and not isinstance(value, StrEnum) else value
        except MucudnnError as error:
            return self.fail(str(error), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.name


class Finite(click.FloatRange):
    """A number in a range, and neither infinite nor NaN, which compares as if it were in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if isfinite(number) else self.fail(f"{value!r} is not a finite number", param, ctx)


class Count(click.IntRange):
    """A whole number from least to most."""

    def __init__(self, least: int = 1, most: int = LARGEST) -> None:
        super().__init__(min=least)
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if number <= self.most else self.fail(f"{number}: it must be at most {self.most}", param, ctx)


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(SIZE, part) for part in parts):
        raise InvalidInputError(f"{text!r} is no list of whole numbers from 1; write for example 1,8,32")
    return tuple(map(int, parts))


COUNTS = Text("N,...", _counts)


def choice(kind: type[StrEnum]) -> Text:
    """Return the type of one member of ``kind``, written with hyphens or underscores."""
    return Text(f"[{'|'.join(_spellings(kind))}]", lambda text: _member(kind, text))


def several(kind: type[StrEnum]) -> Text:
    """Return the type of several members of ``kind``, comma-separated: a tuple in the order of ``kind``."""

    def parse(text: str) -> tuple[StrEnum, ...]:
        chosen = {_member(kind, part) for part in text.split(",")}
        return tuple(member for member in kind if member in chosen)

    return Text(",".join(_spellings(kind)), parse)


def _spellings(kind: type[_Choice]) -> dict[str, _Choice]:
    return {member.value.replace("_", "-"): member for member in kind}


def _member(kind: type[_Choice], text: str) -> _Choice:
    allowed = _spellings(kind)
    spelling = text.strip().replace("_", "-")
    if spelling not in allowed:
        raise InvalidInputError(f"{text!r} is not known; allowed are {', '.join(allowed)}")
    return allowed[spelling]


def parse_shape(text: str) -> tuple[int, int, int]:
    """Read channels, height and width of one sample. Raises ``InvalidInputError``.

    >>> parse_shape("3x224x224")
    (3, 224, 224)
    """
    if re.fullmatch(rf"{SIZE}(x{SIZE}){{2}}", text) is None:
        raise InvalidInputError(f"{text!r} is not channels x height x width of one sample; write for example 3x224x224")
    c, h, w = map(int, text.split("x"))
    return c, h, w


def parse_names(text: str) -> tuple[str, ...]:
    """Read names that commas separate. Raises ``InvalidInputError`` where there is none.

    >>> parse_names("gemm, direct")
    ('gemm', 'direct')
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InvalidInputError(
            f"algorithms has no name in {text!r}; mucudnn doctor lists them: give some, or leave it out"
        )
    return names


def parse_size(text: str) -> str:
    """Check a size, which ``Config`` takes as text. Raises ``InvalidInputError``, also for none."""
    if parse_bytes(text) is None:
        raise InvalidInputError(f"{text!r} is no size; give one, such as 64MiB")
    return text


def parse_sizes(text: str) -> tuple[int | None, ...]:
    """Read workspace limits, each once; none is no limit. Raises ``InvalidInputError``.

    >>> parse_sizes("8MiB, none")
    (8388608, None)
    """
    return tuple(dict.fromkeys(parse_bytes(part.strip()) for part in text.split(",")))


def checked_by(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return a parser that refuses what this one refuses, and keeps the text: a ``Config`` takes it as text."""

    def check(text: str) -> str:
        parse(text)
        return text

    return check


def together(*options: Decorator) -> Decorator:
    """Return one decorator that adds several options, listed by --help in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def batch(default: int | None = None) -> Decorator:
    """Add ``--batch``."""
    return click.option("--batch", type=Count(), default=default, show_default=True, help="Samples in a mini-batch.")


def rounds(default: int, what: str, least: int = 1) -> Decorator:
    """Add ``--rounds`` with a default; what: is repeated, in words."""
    return click.option("--rounds", type=Count(least), default=default, show_default=True, help=what)


input_shape = click.option(
    "--input", "input_shape", type=Text("CxHxW", parse_shape), help="One sample of your own model, as 3x224x224."
)
dtype = click.option(
    "--dtype", type=click.Choice(list(ITEM_BYTES)[::-1]), default="float32", show_default=True, help="Of all tensors."
)
memory_format = click.option(
    "--memory-format",
    type=choice(MemoryFormat),
    default=MemoryFormat.CONTIGUOUS,
    show_default="contiguous",
    help="How activations and filters lie in memory.",
)
memory_formats = click.option(
    "--memory-format",
    "memory_formats",
    type=several(MemoryFormat),
    default=tuple(MemoryFormat),
    help="Which memory formats; default: both.",
)
operations = click.option(
    "--operations", type=several(Operation), default=tuple(Operation), help="Which operations; default: all three."
)
database = click.option(
    "--database",
    type=InputFile(),
    help="SQLite file of the measurements; default: in your cache folder.",
)


def use_threads(threads: int | None) -> None:
    """Let torch compute with so many threads; ``None``: as many as it takes by itself."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _with_threads(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def with_threads(*args: Any, threads: int | None, **rest: Any) -> Any:
        use_threads(threads)
        return function(*args, **rest)

    return with_threads


known_threads = click.option("--threads", type=Count(most=MOST_THREADS), help="CPU threads; default: what torch uses.")
threads = together(known_threads, _with_threads)
"""They are set before the command runs."""


def parse_device(text: str) -> str:
    """Take a device, be it there or not. Raises ``UnavailableError`` for what is none.

    >>> parse_device("cuda:1")
    'cuda:1'
    """
    if re.fullmatch(r"cuda:[0-9]{1,4}", text) is None:
        require_known(text)
    return text


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


known_device = click.option(
    "--device",
    type=Text("TEXT", parse_device),
    default="cpu",
    show_default=True,
    help="Where to run: cpu, cuda (the current GPU), or a GPU by its number, cuda:1.",
)
device = together(known_device, _made_current)
"""A GPU by its number is the current one while the command runs."""

devices = click.option(
    "--devices",
    type=Text("TEXT,...", lambda text: tuple(parse_device(part.strip()) for part in text.split(","))),
    default=(),
    help="Several instead, as cuda:0,cuda:1: each measures a part, in a process of its own.",
)
policy = click.option(
    "--policy",
    type=choice(BatchSizePolicy),
    default=BatchSizePolicy.POWER_OF_TWO,
    show_default="power-of-two",
    help="Micro-batch sizes that are measured.",
)
algorithms = click.option(
    "--algorithms",
    type=Text("NAME,...", parse_names),
    help="Choose from these only (mucudnn doctor lists them); torch's own is always a candidate.",
)
max_relative_error = click.option(
    "--max-relative-error",
    type=Finite(min=LEAST_MAX_RELATIVE_ERROR),
    help="Bar algorithms whose relative L2 error against float64 is above this; default: by dtype, 1e-5 in float32.",
)
environment = click.option(
    "--environment",
    type=Text("TEXT|NUMBER", str),
    help="Where it was measured, if there are several: part of the description, or its number in the list.",
)
deterministic = click.option(
    "--deterministic", is_flag=True, help="Only algorithms that give the same bits on every run."
)
strict = click.option(
    "--strict", is_flag=True, help="Only algorithms with which NaN and infinities spread no further than with torch."
)
thorough = click.option(
    "--thorough", is_flag=True, help="Measure every candidate that is not surely slower: minutes instead of seconds."
)
confirm = click.option(
    "--confirm/--no-confirm",
    default=None,
    help="End tuning with steps in turns; torch's own is put back where ours is slower. Default: where they are short.",
)
_time = Text("TIME", checked_by(parse_time_limit))
time_limit = click.option("--time-limit", type=_time, help="Most measuring per problem, as 60s or 2min.")
first_call_time = click.option(
    "--first-call-time",
    type=_time,
    default=Config().first_call_time,
    show_default=True,
    help="With --how enable: most measuring of a problem that is met, as 60s, or none: no bound but --time-limit.",
)
background = click.option(
    "--background", is_flag=True, help="With --how enable: measure between steps, not in the call that meets a problem."
)
limits_torch = click.option(
    "--limit-torch/--no-limit-torch",
    "limits_torch",
    default=None,
    help="Whether the limit holds torch's own convolution, too, so that something slower runs where it needs more. "
    f"Default: yes, but for a limit of {DEFAULT_WORKSPACE_LIMIT}.",
)
share_tuning = click.option(
    "--share-tuning/--no-share-tuning",
    default=True,
    help="Under torchrun: whether the ranks tune together, or each for itself; rank 0 tells.  [default: together]",
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
    return click.option(
        "--workspace-limit",
        type=Text("SIZE", _limit_or_headroom if headroom else _limit),
        default=default,
        show_default=True,
        help="Most memory that any one operation may take beside its tensors: as 64MiB, none"
        + (", or headroom: what is free below the peak of a training step." if headroom else ".")
        + " The right bound where calls run one after another: they share one buffer.",
    )


def memory_bounds(default: str, headroom: bool = False) -> Decorator:
    """Add ``--workspace-limit``, with this default, ``--limit-torch``, and ``--workspace-budget`` instead of both."""
    budget = click.option(
        "--workspace-budget",
        type=Text("SIZE", parse_size),
        help="Instead of a limit for each: most memory of all operations in sum, divided as it saves most time. "
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
    return bundled("config", partial(_config, **fixed), *options)


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
                "a budget holds torch's own convolution in any case: give --limit-torch or --no-limit-torch beside a "
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
