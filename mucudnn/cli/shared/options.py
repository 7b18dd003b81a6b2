"""Options that more than one command has, and the types that read their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from math import isfinite
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from mucudnn.bench.report.export import CURVE
from mucudnn.running.environment import require_known
from mucudnn.terminal.files import SOURCE, InputFile, OutputFile, OutputFolder
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


def _in_ascii(kind: click.ParamType, value: Any) -> Any:  # type: ignore[type-arg]
    """Refuse the digits of other scripts, which Python's numbers take."""
    return value if not isinstance(value, str) or value.isascii() else kind.fail(f"{value!r} is no number in ASCII")


class Finite(click.FloatRange):
    """A number in a range, and neither infinite nor NaN, which compares as if it were in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(_in_ascii(self, value), param, ctx)
        return number if isfinite(number) else self.fail(f"{value!r} is not a finite number", param, ctx)


class Count(click.IntRange):
    """A whole number from least to most."""

    def __init__(self, least: int = 1, most: int = LARGEST) -> None:
        super().__init__(min=least)
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(_in_ascii(self, value), param, ctx)
        return number if number <= self.most else self.fail(f"{number}: it must be at most {self.most}", param, ctx)


class Counts(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers from 1, comma-separated: a tuple."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        count = Count()
        return (
            tuple(count.convert(part.strip(), param, ctx) for part in value.split(","))
            if isinstance(value, str)
            else value
        )

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.name


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


def parse_environment(text: str) -> str:
    """Take part of a description, or a number. Raises ``InvalidInputError`` for what is part of all of them."""
    if not text.strip():
        raise InvalidInputError(f"{text!r} is part of every environment's description; leave it out to see them all")
    return text


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


batch = click.option("--batch", type=Count(), help="Samples in a mini-batch.")


def batch_of(default: int) -> Decorator:
    """Add ``--batch`` with a default size."""
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
json_file = click.option("--json", "json_file", type=OutputFile(), help="Write the results to this JSON file, too.")
csv_file = click.option("--csv", "csv_file", type=OutputFile(), help="Write the numbers to this CSV file, too.")
csv_and_curve_file = click.option(
    "--csv", "csv_file", type=OutputFile(second=CURVE), help="Write the numbers to this CSV file, too."
)
_OUT = "all samples in this result folder. The same command goes on there where it was stopped."
out_folder = click.option("--out", type=OutputFolder(), help=f"Keep {_OUT}")
out_folder_required = click.option("--out", type=OutputFolder(), required=True, help=f"Keep {_OUT}")
plot_file = click.option(
    "--plot", "plot_file", metavar="FILE.png", type=OutputFile(suffix=".png"), help="Draw them into this PNG file, too."
)
threads = click.option("--threads", type=Count(most=MOST_THREADS), help="CPU threads; default: what torch uses.")


def parse_device(text: str) -> str:
    """Take a device, be it there or not. Raises ``UnavailableError`` for what is none.

    >>> parse_device("cuda:1")
    'cuda:1'
    """
    if re.fullmatch(r"cuda:[0-9]{1,4}", text) is None:
        require_known(text)
    return text


def device_of(help_text: str) -> Decorator:
    """Add ``--device`` with a text for --help. A GPU by its number is the current one while the command runs."""
    option = click.option("--device", type=Text("TEXT", parse_device), default="cpu", show_default=True, help=help_text)
    return together(option, _made_current)


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


device = device_of("Where to run: cpu, cuda (the current GPU), or a GPU by its number, cuda:1.")
known_device = click.option(
    "--device",
    type=Text("TEXT", parse_device),
    default="cpu",
    show_default=True,
    help="Where to run: cpu, cuda (the current GPU), or a GPU by its number, cuda:1.",
)
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
    type=Text("TEXT|NUMBER", parse_environment),
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


def parse_budget(text: str) -> str:
    """Take a size. Raises ``InvalidInputError``, also for none, which would be no budget."""
    if parse_bytes(text) is None:
        raise InvalidInputError(f"{text!r} is no budget; leave it out, or use --workspace-limit none")
    return text


def parse_limit(text: str) -> str:
    """Take a size or none. Raises ``InvalidInputError``."""
    if text == HEADROOM:
        raise InvalidInputError(
            f"{HEADROOM} is free memory in a training step, and this command runs none; give a size, such as 64MiB, or "
            "none (mucudnn tune, solve and bench memory know the headroom)"
        )
    parse_bytes(text)
    return text


def parse_limit_or_headroom(text: str) -> str:
    """Take a size, none or headroom. Raises ``InvalidInputError``."""
    return text if text == HEADROOM else parse_limit(text)


budget_size = Text("SIZE", parse_budget)


def memory_bounds(workspace_limit: str, headroom: bool = False) -> Decorator:
    """Add ``workspace_limit``, with this default, ``limits_torch``, and ``workspace_budget`` instead of both.

    A budget beside one of them is a usage error.

    headroom: whether the limit may be that, too.
    """
    sizes = (
        "as 64MiB, none, or headroom: what is free below the peak of a training step"
        if headroom
        else "as 64MiB, or none"
    )
    limit = click.option(
        "--workspace-limit",
        type=Text("SIZE", parse_limit_or_headroom if headroom else parse_limit),
        default=workspace_limit,
        show_default=True,
        help=f"Most memory that any one operation may take beside its tensors: {sizes}. The right bound where "
        "calls run one after another: they share one buffer.",
    )
    budget = click.option(
        "--workspace-budget",
        type=budget_size,
        help="Instead of a limit for each: most memory of all operations in sum, divided as it saves most time. "
        "The right bound where calls overlap, in threads or streams.",
    )
    return together(limit, limits_torch, budget, _one_bound)


def _one_bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a limit, and what it holds, beside a budget; the default limit does not count."""

    @wraps(function)
    def checked(
        *args: Any, workspace_limit: str, limits_torch: bool | None, workspace_budget: str | None, **rest: Any
    ) -> Any:
        if workspace_budget is None:
            return function(*args, workspace_limit=workspace_limit, limits_torch=limits_torch, **rest)
        context = click.get_current_context()
        if is_given("workspace_limit"):
            raise click.UsageError(
                "a budget is divided instead of a limit for each: give --workspace-limit or "
                "--workspace-budget, not both",
                context,
            )
        if limits_torch is not None:
            raise click.UsageError(
                "a budget holds torch's own convolution in any case: give --limit-torch or --no-limit-torch beside a "
                "--workspace-limit only",
                context,
            )
        return function(*args, workspace_budget=workspace_budget, **rest)

    return checked


def is_given(name: str) -> bool:
    """Whether the parameter of the running command is not at its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def choices(workspace_limit: str, headroom: bool = False) -> Decorator:
    """Add the options of a ``mucudnn.Config``, under its names: ``Config(**given)``; see ``memory_bounds``."""
    return together(memory_bounds(workspace_limit, headroom), measuring)


measuring = together(
    policy, operations, algorithms, max_relative_error, deterministic, strict, thorough, time_limit, database
)
"""The choices of a ``mucudnn.Config`` that do not bound its workspace."""

source_argument = click.argument("source", type=SOURCE)
source = together(source_argument, batch, input_shape)
"""Options that say where the convolutions come from."""


def pop_sizes(given: dict[str, Any]) -> dict[str, Any]:
    """Take out of the given options those that ``load_source`` wants under the same names."""
    return {name: given.pop(name) for name in ("batch", "input_shape", "dtype", "memory_format")}


def use_threads(threads: int | None) -> None:
    """Let torch compute with so many threads; ``None``: as many as it takes by itself."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
