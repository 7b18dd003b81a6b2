"""The choices that a user can make, in one frozen object with defaults that can stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from sys import float_info
from typing import TypeVar

from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import Operation
from mucudnn.words.torch_settings import TORCHS_OWN, rounds_to_tf32
from mucudnn.words.units import parse_bytes, parse_seconds, parse_time_limit
from mucudnn.words.values import flag, member, real, settle, several, shown, texts

_Amount = TypeVar("_Amount")
_Number = TypeVar("_Number", int, float)

HEADROOM = "headroom"  # a workspace limit: what is free below the peak of a training step, call by call
DEFAULT_WORKSPACE_LIMIT = "64MiB"
_FLAGS = ("deterministic", "strict", "thorough", "share_tuning", "fuse", "background")
_OPEN_FLAGS = ("confirm", "limits_torch")  # None leaves them open


class BatchSizePolicy(StrEnum):
    """Micro-batch sizes that are measured: the paper's three policies (μ-cuDNN, section III)."""

    UNDIVIDED = "undivided"
    POWER_OF_TWO = "power-of-two"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Config:
    """The way to tune: memory, algorithms, exactness, time.

    workspace_limit: most workspace of any one operation, inclusive; bytes, text such as ``"64MiB"``, or None: no limit.
    ``"headroom"``: for each call what is free below the peak of a training step, so that the peak stays what it is;
    only ``optimize`` and networks have a step to trace.
    workspace_budget: instead of a limit for each: most workspace of all problems of a network in sum, inclusive.
    cache_budget: most memory, inclusive, for prepared filters that are kept from call to call in inference; 0: keep
    none; None: no bound. Only on the CPU: every call looks at all bytes of a filter to see whether it has changed, and
    would have to wait for a GPU.
    policy: micro-batch sizes to measure: ``undivided``, ``power-of-two`` (with the batch itself) or ``all``.
    operations: which operations to tune, one or several; the others run as in torch. None: all three. In models they
    are those of the layers: forward is y, of a transposed convolution too, which computes it as backward data.
    algorithms: names to choose from, one or several; None: all that the machine has. Torch's own is always a candidate.
    max_relative_error: bar algorithms whose relative L2 error against float64 is above, which is at least
    float64's machine epsilon; None: a default by dtype.
    deterministic: only algorithms that give the same bits on every run. On a GPU torch's own convolution is measured as
    if torch were told to be deterministic. Where it runs afterwards it obeys torch's setting alone: ``optimize`` warns
    where that is off, and names it.
    time_limit: most seconds of measuring per problem, above 0, number or text such as ``"60s"``; None: until the noise
    is small.
    database: SQLite file of the measurements, ``~`` being your home; None: in the user's cache folder.
    strict: only algorithms with which a NaN or an infinity in x or dy spoils the same results as with torch's own, and
    no others: no Winograd or Fourier transforms (docs/compatibility.md), and nothing of a library that may be one.
    first_call_time: with ``enable`` and ``tuned``, most seconds of measuring for a problem that is met; None: as
    ``time_limit`` says.
    background: with ``enable`` and ``tuned``, do not measure in the call that meets a problem, but between steps, for
    at most a twentieth of the time (docs/training.md).
    confirm: whether ``optimize`` ends with interleaved steps of the whole model, with torch's own and ours, and
    puts torch's own back where ours is slower there. None: in training, where a step is neither too short nor too long,
    and where processes that take part tune together; or where a step is given; what the database has of it is not run
    again.
    thorough: measure every candidate that is not surely slower, with many samples: minutes instead of seconds. The
    default looks at each algorithm once, at the others of its sizes where it is the best, and not at all where like
    problems say that it is hopeless.
    share_tuning: under an initialised ``torch.distributed`` process group of more than one rank, ``optimize`` and
    ``tune`` deal the measuring out over the ranks, and all ranks choose alike (docs/ranks.md). ``False``: each rank
    tunes for itself.
    fuse: for inference, ``optimize`` returns a graph of the model, in which batch norm is folded into convolutions, and
    additions and ReLUs are computed with them (docs/inference.md). Only the forward operation is tuned then, whatever
    ``operations`` says.
    limits_torch: whether torch's own convolution, too, must be within the workspace limit, so that something slower
    runs in its place where it is not. None: with every limit but the default one.

    Policy and operations may be given as text, numbers as NumPy's, and several names in any iterable; one text is one
    name. The fields then have the types that are named below, so that equal configs are equal and hash alike.

    Raises ``InvalidInputError`` for a value that is not allowed.

    >>> Config().workspace_limit_bytes  # a text stays as it was written; the properties have bytes and seconds
    67108864
    >>> Config(workspace_limit=1000).workspace_limit_bytes  # a number is bytes
    1000
    >>> Config(time_limit="2min", operations="forward").time_limit_s
    120.0
    """

    workspace_limit: int | str | None = DEFAULT_WORKSPACE_LIMIT
    workspace_budget: int | str | None = None
    cache_budget: int | str | None = 0
    policy: BatchSizePolicy | str = BatchSizePolicy.POWER_OF_TWO
    operations: tuple[Operation, ...] = tuple(Operation)
    algorithms: tuple[str, ...] | None = None
    max_relative_error: float | None = None
    deterministic: bool = False
    time_limit: float | str | None = None
    database: Path | str | None = None
    strict: bool = False
    thorough: bool = False
    first_call_time: float | str | None = "1s"
    background: bool = False
    confirm: bool | None = None
    limits_torch: bool | None = None
    share_tuning: bool = True
    fuse: bool = False

    def __post_init__(self) -> None:
        settle(
            self,
            workspace_limit=_limit(self.workspace_limit),
            workspace_budget=_amount(parse_bytes, self.workspace_budget, "workspace_budget"),
            cache_budget=_amount(parse_bytes, self.cache_budget, "cache_budget"),
            policy=member(BatchSizePolicy, self.policy, "policy"),
            operations=_operations(self.operations),
            algorithms=_algorithms(self.algorithms),
            max_relative_error=_error_bound(self.max_relative_error),
            time_limit=_amount(parse_time_limit, self.time_limit, "time_limit"),
            first_call_time=_amount(parse_time_limit, self.first_call_time, "first_call_time"),
            database=_file(self.database),
            **{name: flag(getattr(self, name), name) for name in _FLAGS},
            **{name: flag(getattr(self, name), name) for name in _OPEN_FLAGS if getattr(self, name) is not None},
        )
        if self.workspace_budget_bytes is not None and self.workspace_limit != DEFAULT_WORKSPACE_LIMIT:
            raise InvalidInputError(
                f"workspace_limit is {self.workspace_limit!r} and workspace_budget is {self.workspace_budget!r}; a "
                "budget is divided instead of a limit for each: give one of the two"
            )

    @property
    def has_headroom_limit(self) -> bool:
        return self.workspace_limit == HEADROOM

    @property
    def workspace_limit_bytes(self) -> int | None:
        """Limit of each problem; None too where there is a budget. Raises ``InvalidInputError`` for ``"headroom"``."""
        if self.has_headroom_limit:
            raise InvalidInputError(
                f"the workspace limit is {HEADROOM!r}, which needs a model whose training step can be traced: use "
                "mucudnn.optimize, or name a network or package.module:factory"
            )
        return None if self.workspace_budget_bytes is not None else parse_bytes(self.workspace_limit)

    @property
    def baseline_exempt(self) -> bool:
        """Whether torch's own convolution may run whatever workspace it takes."""
        if self.workspace_budget is not None:
            return False
        return self.workspace_limit == DEFAULT_WORKSPACE_LIMIT if self.limits_torch is None else not self.limits_torch

    @property
    def workspace_budget_bytes(self) -> int | None:
        """Bound of all problems in sum; None: there is no budget."""
        return parse_bytes(self.workspace_budget)

    @property
    def cache_budget_bytes(self) -> int | None:
        return parse_bytes(self.cache_budget)

    @property
    def time_limit_s(self) -> float | None:
        return parse_seconds(self.time_limit)

    @property
    def first_call_time_s(self) -> float | None:
        return parse_seconds(self.first_call_time)

    def error_bound(self, dtype: str, numerics: str = "") -> float:
        """Return the largest relative L2 error allowed for a dtype, under the ``numerics`` of an environment."""
        if self.max_relative_error is not None:
            return self.max_relative_error
        if dtype == "float32" and rounds_to_tf32(numerics):
            return TF32_MAX_RELATIVE_ERROR
        return DEFAULT_MAX_RELATIVE_ERROR[dtype]


# float32: what the bar of the project promises. float64: some units in the last place of the stored result. Half
# precision: about twice torch's own error where it rounds sums on the way (docs/compatibility.md).
# TF32 keeps 10 bits of a factor's mantissa: 2**-11 of each is lost at most, and torch's own convolution loses it too.
TF32_MAX_RELATIVE_ERROR = 1e-3
LEAST_MAX_RELATIVE_ERROR = float_info.epsilon
DEFAULT_MAX_RELATIVE_ERROR = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def config_or_default(config: object) -> Config:
    """Return the config, or ``Config()`` for None. Raises ``InvalidInputError`` for anything else."""
    if config is None:
        return Config()
    if isinstance(config, Config):
        return config
    remedy = "mucudnn.Config(**config)" if isinstance(config, Mapping) else "a mucudnn.Config, or None for its defaults"
    raise InvalidInputError(f"config is {shown(config)}; give {remedy}")


def _limit(value: int | str | None) -> int | str | None:
    is_headroom = isinstance(value, str) and value == HEADROOM
    return HEADROOM if is_headroom else _amount(parse_bytes, value, "workspace_limit")


def _amount(parse: Callable[[_Amount], _Number | None], value: _Amount, name: str) -> str | _Number | None:
    """Check an amount. A text stays as it was written, since it is shown again; a number is as ``parse`` has it."""
    try:
        parsed = parse(value)
    except InvalidInputError as error:
        raise InvalidInputError(f"{name}: {error}") from None
    return str(value) if isinstance(value, str) else parsed


def _operations(value: object) -> tuple[Operation, ...]:
    if value is None:
        return tuple(Operation)
    operations = tuple(dict.fromkeys(member(Operation, one, "operation") for one in several(value)))
    if not operations:
        raise InvalidInputError("operations is empty; name at least one of " + ", ".join(Operation))
    return operations


def _algorithms(value: object) -> tuple[str, ...] | None:
    names = None if value is None else texts(value, "algorithms")
    if names is not None and not all(names or [""]):
        raise InvalidInputError(
            "algorithms has no name, or an empty one; name some (mucudnn doctor lists them, "
            f"{TORCHS_OWN} is torch's own alone), or leave it out for all"
        )
    return names


def _error_bound(value: object) -> float | None:
    bound = None if value is None else real(value, "max_relative_error")
    if bound is not None and bound < LEAST_MAX_RELATIVE_ERROR:
        raise InvalidInputError(
            f"max_relative_error is {shown(value)}; it must be at least {LEAST_MAX_RELATIVE_ERROR}, the machine "
            "epsilon of float64, against which errors are measured"
        )
    return bound


def _file(value: Path | str | None) -> Path | None:
    if value is None:
        return None
    try:
        path = Path(value).expanduser()
    except (TypeError, RuntimeError) as error:  # no path, and nobody's home
        raise InvalidInputError(f"database is {shown(value)}: {error}; name a file, or None for the default") from None
    if path == Path() or "\0" in str(path):
        raise InvalidInputError(f"database is {shown(value)}; name a file, or None for the default")
    return path
