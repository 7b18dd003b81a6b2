"""The settings that a user can make, in one frozen dataclass with defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from enum import StrEnum
from functools import partial, wraps
from pathlib import Path
from sys import float_info
from typing import Any, TypeVar

from mucudnn.core.errors import InvalidInputError, warn
from mucudnn.core.problem import Operation
from mucudnn.core.records import source_of
from mucudnn.core.torch_settings import TORCHS_OWN, rounds_to_tf32
from mucudnn.core.values import (
    did_you_mean,
    flag,
    member,
    parse_bytes,
    parse_seconds,
    parse_time_limit,
    real,
    settle,
    several,
    shown,
    texts,
)

_Amount = TypeVar("_Amount")
_Number = TypeVar("_Number", int, float)
Check = Callable[[Any, str], Any]

HEADROOM = "headroom"  # workspace limit of each call: the memory free below the peak of a training step
DEFAULT_WORKSPACE_LIMIT = "64MiB"
# float32: the error that the documentation promises. float64: a few units in the last place of the stored result. Half
# precision: about twice torch's own error where torch rounds partial sums (docs/compatibility.md).
# TF32 keeps 10 bits of a factor's mantissa, a relative error of at most 2**-11, in torch's own convolution too.
TF32_MAX_RELATIVE_ERROR = 1e-3
LEAST_MAX_RELATIVE_ERROR = float_info.epsilon
DEFAULT_MAX_RELATIVE_ERROR = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


class BatchSizePolicy(StrEnum):
    """Policy of micro-batch sizes to measure: the three policies of the paper (μ-cuDNN, section III)."""

    UNDIVIDED = "undivided"
    POWER_OF_TWO = "power-of-two"
    ALL = "all"


def _amount(parse: Callable[[_Amount], _Number | None], value: _Amount, name: str) -> str | _Number | None:
    """Check an amount (bytes or time) with ``parse``; return text as given, to be shown again, and numbers parsed."""
    try:
        parsed = parse(value)
    except InvalidInputError as error:
        raise InvalidInputError(f"{name}: {error}") from None
    return str(value) if isinstance(value, str) else parsed


_bytes = partial(_amount, parse_bytes)
_time = partial(_amount, parse_time_limit)


def _operations(value: object, name: str) -> tuple[Operation, ...]:
    chosen = {member(Operation, operation, f"one of {name}") for operation in several(_separated(value))}
    if not chosen:
        raise InvalidInputError(f"{name} is empty; name at least one of " + ", ".join(Operation))
    return tuple(operation for operation in Operation if operation in chosen)


def _separated(value: object) -> object:
    """Return the comma-separated parts of a text; other values as they are."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _algorithms(value: object, name: str) -> tuple[str, ...]:
    names = texts(_separated(value), name)
    if not all(names or [""]):
        raise InvalidInputError(
            f"{name} is empty or has an empty name; name some (mucudnn doctor lists them, "
            f"{TORCHS_OWN} is PyTorch's own alone)"
        )
    return names


def _error_bound(value: object, name: str) -> float:
    bound = real(value, name)
    if bound < LEAST_MAX_RELATIVE_ERROR:
        raise InvalidInputError(
            f"{name} is {shown(value)}; it must be at least {LEAST_MAX_RELATIVE_ERROR}, the machine "
            "epsilon of float64, against which errors are measured"
        )
    return bound


def _file(value: Path | str | None, name: str) -> Path | None:
    if value is None:
        return None
    try:
        path = Path(value).expanduser()
    except (TypeError, RuntimeError) as error:  # not a path, or the home folder of an unknown user
        raise InvalidInputError(f"{name} is {shown(value)}: {error}; name a file, or None for the default") from None
    if path == Path() or "\0" in str(path):
        raise InvalidInputError(f"{name} is {shown(value)}; name a file, or None for the default")
    return path


def or_word(check: Check, *words: str, meaning: object = None) -> Check:
    """Return a check that takes None and ``words``, too, and returns their meaning; messages name the first word."""

    def checked(value: object, name: str) -> Any:
        if value is None or (isinstance(value, str) and value.strip().lower() in words):
            return meaning
        try:
            return check(value, name)
        except InvalidInputError as error:
            raise InvalidInputError(f"{error}, or {words[0]}") from None

    return checked


def _setting(
    default: object,
    check: Check,
    text: str,
    metavar: str = "",
    words: tuple[str, ...] = (),
    meaning: object = None,
) -> Any:
    """Return a field of ``Config`` from which its check and its command-line option are made.

    check: takes a value and its name, and returns the converted value; raises ``InvalidInputError``.
    text: help of the option.
    metavar: placeholder of the option's value; empty for a flag.
    words: what may be given in place of a value, as None may; the first is what is printed.
    meaning: what the field then is.
    """
    word, checked = (words[0], or_word(check, *words, meaning=meaning)) if words else ("", check)
    option = {"text": text, "metavar": metavar}
    return field(default=default, metadata={"check": checked, "word": word, "meaning": meaning, **option})


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of tuning: memory, algorithms, accuracy, time.

    Where a setting has a word, such as ``"none"`` or ``"auto"``, None means the same.

    workspace_limit: largest workspace of any one operation, inclusive: a number of bytes, text such as ``"64MiB"``, or
    ``"none"`` for no limit. It applies to torch's own convolution too, unless it is the default. ``"headroom"`` allows
    each call the memory that is free below the peak of a training step, so that the peak does not rise; only
    ``optimize`` and networks have a step to trace.
    workspace_budget: largest workspace of all problems of a network together, inclusive, in place of a limit for each;
    ``"off"`` for a limit for each.
    cache_budget: most memory, inclusive, for prepared filters that a model running as a graph (``fuse``,
    ``memory_budget``) keeps between calls; 0 keeps none, ``"none"`` is no limit.
    policy: micro-batch sizes to measure: ``"undivided"``, ``"power-of-two"`` (and the batch size itself) or ``"all"``.
    operations: one or several operations to tune, or ``"all"``; torch computes the others. In models they are the
    operations of the layers: forward computes y, for a transposed convolution too, which runs it as backward data.
    algorithms: names to choose from, one or several, or ``"all"`` that are available. Torch's own is always a
    candidate.
    max_relative_error: largest relative L2 error of an algorithm against float64, at least float64's machine epsilon;
    ``"auto"`` for a default of the dtype.
    deterministic: use only algorithms that give the same bits on every run. On a GPU torch's own convolution is
    measured with torch's deterministic setting on. When it runs later, only torch's setting counts; ``optimize`` warns
    if it is off.
    batch_invariant: whether a sample's result has the same bits alone and in any batch, in ``optimize``, with one
    number of threads: each layer has one algorithm, in micro-batches of sizes with which the bits are the same. It
    implies ``deterministic`` (docs/compatibility.md).
    time_limit: most seconds per problem, above 0, as a number or text such as ``"60s"``. Two thirds are for measuring
    candidates, the rest for whole runs; what a problem takes beyond its time, since PyTorch's own and one that fits are
    always measured, is taken from the next ones. ``"auto"`` is no limit, and measures until the noise is small; with
    ``enable`` and ``tuned`` it is one second, which one call of a problem then takes.
    database: SQLite file of the measurements, where ``~`` is the home folder; None for one in the user's cache folder.
    strict: use only algorithms with which a NaN or an infinity in x or dy affects the same results as with torch's own:
    no Winograd or Fourier transforms (docs/compatibility.md), and no library algorithm that may be one.
    keep_heap: whether the process keeps freed memory of its heap for the next tensors, on the CPU with glibc.
    ``"auto"``: ``optimize`` keeps it if steps of the model, timed with and without, are then more than 3 % faster;
    ``enable`` and ``tuned`` if the kernel's share of the processor time falls by as much (docs/memory.md).
    confirm: whether ``optimize`` ends by timing steps of the whole model, torch's convolutions and mucudnn's
    interleaved, and restores torch's where mucudnn's are slower. ``"auto"`` confirms if a step is given, and in
    training if a step is neither too short nor too long and the processes that take part tune together.
    share_tuning: in a ``torch.distributed`` process group of more than one rank, ``optimize`` and ``tune`` divide the
    measuring among the ranks, and all ranks choose alike (docs/ranks.md). If False, each rank tunes for itself.
    fuse: what ``optimize`` computes together. ``"auto"``: in training, norms with the additions and activations behind
    them, as groups, where these are faster than PyTorch's operators (docs/training.md). False: nothing. True, for
    inference: it returns a graph of the model in which batch norm is folded into convolutions, and additions and
    activations are computed with them (docs/inference.md). Only the forward operation is tuned then, regardless of
    ``operations``.
    memory_budget: the most memory, inclusive, of a call of a model in ``eval()``, for activations and workspace
    together, beside parameters, arguments and results (docs/bands.md); or of a training step of a model in ``train()``,
    beside parameters, their gradients, the state of the optimizer and the batch (docs/within.md). ``"off"`` for no
    bound.

    Policy and operations may be given as text, numbers as NumPy's, and several names as any iterable or as a text with
    commas. The fields are converted to the types below, words to None, so that equal configs compare and hash equal.

    Raises ``InvalidInputError`` for a value that is not allowed.

    >>> Config().workspace_limit_bytes  # fields keep text as given; properties return bytes and seconds
    67108864
    >>> Config(workspace_limit=1000).workspace_limit_bytes  # in bytes
    1000
    >>> Config(time_limit="2min", operations="forward").time_limit_s
    120.0
    >>> Config(workspace_limit="none", algorithms="all") == Config(workspace_limit=None, algorithms=None)
    True
    """

    workspace_limit: int | str | None = _setting(
        DEFAULT_WORKSPACE_LIMIT,
        or_word(_bytes, HEADROOM, meaning=HEADROOM),
        "Largest workspace of any one operation: a size such as 64MiB, or none. The right limit if calls run one after "
        "another, since they share one buffer. Any but 64MiB applies to PyTorch's own convolution too.",
        "SIZE",
        ("none",),
    )
    workspace_budget: int | str | None = _setting(
        None,
        _bytes,
        "In place of a limit for each operation: workspace of all together, divided to save the most time. The right "
        "limit if calls overlap, in threads or streams.",
        "SIZE",
        ("off", "none"),
    )
    cache_budget: int | str | None = _setting(
        0,
        _bytes,
        "Most memory for prepared filters that are kept between calls, such as 64MiB, or none for no limit.",
        "SIZE",
        ("none",),
    )
    policy: BatchSizePolicy | str = _setting(
        BatchSizePolicy.POWER_OF_TWO,
        partial(member, BatchSizePolicy),
        "Micro-batch sizes to measure.",
        f"[{'|'.join(BatchSizePolicy)}]",
    )
    operations: tuple[Operation, ...] = _setting(
        tuple(Operation),
        _operations,
        "Operations to use.",
        ",".join(Operation).replace("_", "-"),
        ("all",),
        meaning=tuple(Operation),
    )
    algorithms: tuple[str, ...] | None = _setting(
        None,
        _algorithms,
        "Choose only from these (mucudnn doctor lists them); PyTorch's own is always a candidate.",
        "NAME,...",
        ("all",),
    )
    max_relative_error: float | None = _setting(
        None,
        _error_bound,
        "Exclude algorithms with a larger relative L2 error against float64; auto: by dtype, 1e-5 for float32.",
        "NUMBER",
        ("auto",),
    )
    deterministic: bool = _setting(False, flag, "Use only algorithms that give the same bits on every run.")
    batch_invariant: bool = _setting(
        False, flag, "Choose so that a sample's result has the same bits alone and in any batch."
    )
    time_limit: float | str | None = _setting(
        None,
        _time,
        "Most time to tune one problem, such as 60s or 2min; auto: no limit, but 1s where convolutions are tuned as "
        "they occur.",
        "TIME",
        ("auto", "none"),
    )
    database: Path | str | None = _setting(
        None, _file, "SQLite file of the measurements; default: in your cache folder.", "FILE"
    )
    strict: bool = _setting(
        False, flag, "Use only algorithms with which NaN and infinities spread no further than with PyTorch."
    )
    keep_heap: bool | None = _setting(
        None,
        flag,
        "Keep freed memory of the heap for the next tensors. Default: auto, if that is measured to save time.",
        words=("auto",),
    )
    confirm: bool | None = _setting(
        None,
        flag,
        "After tuning, time steps interleaved with PyTorch's, and restore PyTorch's where faster. Default: auto, if "
        "steps are short.",
        words=("auto",),
    )
    share_tuning: bool = _setting(
        True,
        flag,
        "Under torchrun: whether the ranks tune together, or each for itself; rank 0 prints the result.",
    )
    memory_budget: int | str | None = _setting(
        None,
        _bytes,
        "Most memory of a call, for activations and workspace together, such as 300MiB. In inference the model then "
        "runs in bands of rows; in training what is not kept is computed again.",
        "SIZE",
        ("off", "none"),
    )
    fuse: bool | None = _setting(
        None,
        flag,
        "For inference: compute batch norm, additions and ReLUs with the convolutions. Default: auto, which in "
        "training computes norms with additions and activations where that saves time.",
        words=("auto",),
    )

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            settle(self, **{name: setting.metadata["check"](getattr(self, name), name)})
        if self.workspace_budget_bytes is not None and self.workspace_limit != DEFAULT_WORKSPACE_LIMIT:
            words = in_words(self)
            raise InvalidInputError(
                f"workspace_limit is {words['workspace_limit']!r} and workspace_budget is "
                f"{words['workspace_budget']!r}; they exclude each other: give one of the two"
            )

        if self.batch_invariant:
            settle(self, deterministic=True)
            if self.has_headroom_limit or self.workspace_budget is not None:
                raise InvalidInputError(
                    "batch_invariant needs a workspace limit that does not depend on the batch: leave workspace_budget "
                    f"and workspace_limit={HEADROOM!r} out"
                )

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in in_words(self).items())})"

    @property
    def has_headroom_limit(self) -> bool:
        return self.workspace_limit == HEADROOM

    @property
    def workspace_limit_bytes(self) -> int | None:
        """Workspace limit of each problem in bytes; None if there is no limit, or a budget for all problems instead.

        Raises ``InvalidInputError`` for the limit "headroom".
        """
        if self.has_headroom_limit:
            raise InvalidInputError(
                f"the workspace limit is {HEADROOM!r}, which needs a model whose training step can be traced: use "
                "mucudnn.optimize, or name a network or package.module:factory"
            )
        return None if self.workspace_budget_bytes is not None else parse_bytes(self.workspace_limit)

    @property
    def baseline_exempt(self) -> bool:
        """Whether torch's own convolution may exceed the workspace limit."""
        return self.workspace_limit == DEFAULT_WORKSPACE_LIMIT and self.workspace_budget is None

    @property
    def workspace_budget_bytes(self) -> int | None:
        """Workspace budget of all problems together, in bytes, or None if there is no budget."""
        return parse_bytes(self.workspace_budget)

    @property
    def memory_budget_bytes(self) -> int | None:
        return parse_bytes(self.memory_budget)

    @property
    def cache_budget_bytes(self) -> int | None:
        return parse_bytes(self.cache_budget)

    @property
    def time_limit_s(self) -> float | None:
        return parse_seconds(self.time_limit)

    def allows(self, algorithm: str) -> bool:
        """Return whether ``algorithms`` has this algorithm or its source, or it is torch's own."""
        return self.algorithms is None or bool({algorithm, source_of(algorithm)} & {TORCHS_OWN, *self.algorithms})

    def error_bound(self, dtype: str, numerics: str = "") -> float:
        """Return the largest allowed relative L2 error for a dtype.

        numerics: settings of an environment that affect accuracy, such as TF32.
        """
        if self.max_relative_error is not None:
            return self.max_relative_error
        if dtype == "float32" and rounds_to_tf32(numerics):
            return TF32_MAX_RELATIVE_ERROR
        return DEFAULT_MAX_RELATIVE_ERROR[dtype]


SETTINGS: Mapping[str, Field[Any]] = {setting.name: setting for setting in fields(Config)}
"""The fields of ``Config``, with the arguments of ``_setting`` as their metadata, by name."""


def in_words(config: Config) -> dict[str, Any]:
    """Return the values of a config by name, as they are printed and may be given: words in place of None.

    >>> words = in_words(Config(operations="forward", workspace_limit=None))
    >>> words["operations"], words["workspace_limit"], words["algorithms"], words["confirm"]
    (('forward',), 'none', 'all', 'auto')
    """
    words: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        value = getattr(config, name)
        if setting.metadata["word"] and value == setting.metadata["meaning"]:
            words[name] = setting.metadata["word"]
        elif isinstance(value, tuple):
            words[name] = tuple(map(str, value))
        else:
            words[name] = str(value) if isinstance(value, (StrEnum, Path)) else value
    return words


_init = Config.__init__


@wraps(_init)
def _init_without_typos(self: Config, *values: Any, **settings: Any) -> None:
    if unknown := [name for name in settings if name not in SETTINGS]:
        hint = did_you_mean(unknown[0], SETTINGS) or f"its settings are {', '.join(SETTINGS)}"
        raise InvalidInputError(f"Config has no setting {unknown[0]}; {hint.rstrip()}")
    _init(self, *values, **settings)


Config.__init__ = _init_without_typos  # type: ignore[method-assign]


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def config_from_environment(environment: Mapping[str, str]) -> Config:
    """Return the config set by variables such as ``MUCUDNN_WORKSPACE_LIMIT``, one for each field of ``Config``.

    Raises ``InvalidInputError`` for a value that is not allowed.

    >>> config_from_environment({"MUCUDNN_STRICT": "1", "MUCUDNN_OPERATIONS": "forward"}).operations
    (<Operation.FORWARD: 'forward'>,)
    """
    return Config(**variables(environment))


def variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the fields of ``Config`` that variables such as ``MUCUDNN_WORKSPACE_LIMIT`` set, by name."""
    named = {name: environment.get(f"MUCUDNN_{name.upper()}") for name in SETTINGS}
    return {name: from_text(name, text) for name, text in named.items() if text}


# Variables that are read elsewhere: by the package, its build and its tests.
_OTHER_VARIABLES = (
    *("BUILD", "BUILDS", "ENABLE", "LIBCUDNN", "COMPILE", "WATCH", "SANITIZE", "PRODUCTS", "SNAPSHOTS"),
    *("FUZZ", "FUZZ_SEED", "FUZZ_FIRST", "TEST_THREADS"),
)


def unknown_variables(environment: Mapping[str, str], options: Iterable[str] = ()) -> list[str]:
    """Return a sentence for each variable ``MUCUDNN_...`` that nothing reads.

    options: names of other settings.

    >>> unknown_variables({"MUCUDNN_WORKSPACE_LIMT": "3", "MUCUDNN_STRICT": "1"})
    ['MUCUDNN_WORKSPACE_LIMT is ignored: there is no such setting; did you mean WORKSPACE_LIMIT?']
    """
    settings = [name.upper() for name in (*SETTINGS, *_OTHER_VARIABLES, *options)]
    names = (name.removeprefix("MUCUDNN_") for name in sorted(environment) if name.startswith("MUCUDNN_"))
    return [
        f"MUCUDNN_{name} is ignored: there is no such setting; {did_you_mean(name, settings)}".rstrip("; ")
        for name in names
        if name not in settings
    ]


def from_text(name: str, text: str) -> Any:
    """Return the text of a setting, converted if the setting is a number or a flag and the text is one, too."""
    metavar = SETTINGS[name].metadata["metavar"]
    if metavar == "NUMBER":
        with suppress(ValueError):
            return float(text)
    if metavar or text.lower() not in (*_TRUE, *_FALSE):
        return text
    return text.lower() in _TRUE


def without_cache_budget(config: Config) -> Config:
    """Return the config of convolutions outside a graph, which keep no filters; warn if ``cache_budget`` is not 0."""
    if config.cache_budget_bytes != 0:
        warn("cache_budget keeps filters in models that run as graphs: it has no effect without fuse or memory_budget")
    return replace(config, cache_budget=0)


def config_or_default(config: object) -> Config:
    """Return the given config, or ``Config()`` for None. Raises ``InvalidInputError`` for anything else."""
    if config is None:
        return Config()
    if isinstance(config, Config):
        return config
    remedy = "mucudnn.Config(**config)" if isinstance(config, Mapping) else "a mucudnn.Config, or None for its defaults"
    raise InvalidInputError(f"config is {shown(config)}; give {remedy}")
