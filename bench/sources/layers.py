"""Layer tables: the convolutions of a network, a published benchmark, a CSV file or the user's own model."""

from __future__ import annotations

import csv
import importlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from mucudnn.bench.sources.blame import blamed_in_building, blamed_in_computing
from mucudnn.bench.sources.networks import NETWORKS, arguments_for, build, input_shape_of
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.tracing.convolutions import convolutions_of, problem_operation, trace
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MOST_ELEMENTS, MOST_SAMPLES, ConvProblem, MemoryFormat, Operation, Pair, dtype_name
from mucudnn.words.values import flag, instance, member, settle, several, shown, text, whole

__all__ = [
    "NETWORKS",
    "TABLES",
    "Layer",
    "LayerTable",
    "convolutions_of",
    "load_source",
    "read_csv",
    "trace",
    "with_filters",
]

TABLES = MappingProxyType(
    {
        "deepbench-train": "training_set",
        "deepbench-inference-server": "inference_server_set",
        "deepbench-inference-device": "inference_device_set",
    }
)
_DEEPBENCH = Path(__file__).parent / "data" / "deepbench_conv.csv"
_REQUIRED = ("c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w")
_OPTIONAL = MappingProxyType({"n": 1, "dilation": 1, "groups": 1, "count": 1})
_TEXT = ("name", "set")


@dataclass(frozen=True, slots=True)
class Layer:
    """One geometry of a network, as its forward problem, and how often it occurs.

    names: of the module, or of all that are equal; one text is one name. batch_size: samples in a call.
    input_needs_gradient: False where the input is the network's own, whose gradient nobody asks for. Such a layer has
    no BACKWARD_DATA. transposed: whether its module is an ``nn.ConvTranspose2d``, so that x of the problem is what the
    module returns: the module's forward is BACKWARD_DATA, its dx FORWARD. has_bias: whether any of the modules adds a
    bias; not known of the layers of a table, and no part of a comparison.

    Raises ``InvalidInputError`` for other values, and for batches of more than ``MOST_SAMPLES``.
    """

    names: tuple[str, ...]
    problem: ConvProblem
    batch_size: int
    count: int = 1
    input_needs_gradient: bool = True
    transposed: bool = False
    has_bias: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        settle(
            self,
            names=tuple(text(name, "one of names") for name in several(self.names)),
            problem=instance(ConvProblem, self.problem, "problem"),
            batch_size=whole(self.batch_size, "batch_size", 1, MOST_SAMPLES),
            count=whole(self.count, "count", 1),
            input_needs_gradient=flag(self.input_needs_gradient, "input_needs_gradient"),
            transposed=flag(self.transposed, "transposed"),
            has_bias=flag(self.has_bias, "has_bias"),
        )

    @property
    def name(self) -> str:
        """``a, b``: all names, for people and for files."""
        return ", ".join(self.names)


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Layers of a source in the order of their first call; no two are equal."""

    source: str
    layers: tuple[Layer, ...]

    def problems(self, operations: Iterable[Operation]) -> list[tuple[Layer, ConvProblem]]:
        """Each layer with each operation that it has; the operations are those of the layers, y being forward."""
        wanted = [member(Operation, operation, "operation") for operation in operations]
        return [
            (layer, layer.problem.with_operation(problem_operation(operation, transposed=layer.transposed)))
            for layer in self.layers
            for operation in wanted
            if operation is not Operation.BACKWARD_DATA or layer.input_needs_gradient
        ]


def load_source(
    source: str,
    *,
    batch: int | None = None,
    input_shape: tuple[int, int, int] | None = None,
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
) -> LayerTable:
    """The convolutions of a source, equal ones merged with their count.

    source: a name of ``NETWORKS`` or ``TABLES``, a CSV file of layers (see ``read_csv``), ``package.module:factory`` or
    ``file.py:factory``. These name a function without arguments that returns an ``nn.Module``, or the module itself.
    batch: samples in a mini-batch; ``None``: the table's own sizes, or 1 where there are none. input_shape: (C, H, W)
    of one sample; models need it, networks have one, tables take none. dtype, memory_format: those of all problems.

    Raises ``InvalidInputError`` for what cannot be found, read or run, and for sources without a convolution.

    >>> first = load_source("alexnet", batch=32).layers[0]
    >>> print(first.name, first.batch_size, first.problem)
    features.0 32 forward 3x224x224 -> 64, 11x11, stride 4x4, padding 2x2, float32 contiguous
    """
    layers = _load(
        source, None if batch is None else whole(batch, "batch", 1, MOST_SAMPLES), _checked_shape(input_shape)
    )
    if not layers:
        raise InvalidInputError(f"{source} has no convolution (torch.nn.Conv2d) to tune; name another source")
    as_asked = (
        replace(layer, problem=replace(layer.problem, dtype=dtype, memory_format=memory_format)) for layer in layers
    )
    return LayerTable(source, _merged(as_asked))


def read_csv(path: Path, *, only_set: str | None = None) -> list[Layer]:
    """Layers of a CSV file, one a line, under a heading with c, h, w, k, r, s, pad_h, pad_w, stride_h and stride_w.

    The columns may be in any order, and so may the optional ones: n (batch size), name, dilation, groups, count, set.
    only_set: only the lines with this ``set``. A line without a name is called by its number.

    Raises ``InvalidInputError`` with file, line and what is wrong.
    """
    try:
        # Not pandas: it drops the line numbers that messages need, and takes longer to load than to read
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, strict=True)
            _check_columns(path, reader.fieldnames or ())
            lines = [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInputError(f"{path} cannot be read as a CSV file of layers: {reason}") from error
    return [_layer(path, number, line) for number, line in lines if only_set in (None, line.get("set"))]


def with_filters(table: LayerTable, filters: Sequence[Pair]) -> LayerTable:
    """Keep only layers with a filter of these (height, width). Raises ``InvalidInputError`` if there are none."""
    layers = tuple(layer for layer in table.layers if (layer.problem.r, layer.problem.s) in filters)
    if not layers:
        there_are = sorted({(layer.problem.r, layer.problem.s) for layer in table.layers})
        raise InvalidInputError(
            f"{table.source} has no layer with a filter of {_filters(filters)}; it has {_filters(there_are)}"
        )
    return replace(table, layers=layers)


def _filters(filters: Iterable[Pair]) -> str:
    return ", ".join(f"{r}x{s}" for r, s in filters)


def load_model(
    source: str,
    *,
    input_shape: tuple[int, int, int] | None = None,
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
) -> tuple[nn.Module, tuple[int, int, int]]:
    """The model behind a source, and the (C, H, W) of one sample. Its parameters have the dtype and memory format.

    What it is called with, beside images: ``networks.arguments_for``.

    The parameters of the built-in networks have arbitrary values: the caller fills them.

    Raises ``InvalidInputError`` for sources without a model (tables, CSV files), and as ``load_source``.
    """
    with importable(source):
        found = _model_of(source, _checked_shape(input_shape))
    if found is None:
        names = ", ".join(NETWORKS)
        raise InvalidInputError(
            f"{source} has no model to run; {_hint(source, NETWORKS)}name one of {names}, package.module:factory, or "
            "file.py:factory"
        )
    model, shape = found
    torch_dtype, torch_format = getattr(torch, dtype_name(dtype)), TORCH_FORMATS[memory_format]
    return model.to(dtype=torch_dtype, memory_format=torch_format), shape  # type: ignore[call-overload]


def _checked_shape(shape: object) -> tuple[int, int, int] | None:
    if shape is None:
        return None
    if not (isinstance(shape, Sequence) and len(shape) == len("CHW")):
        raise InvalidInputError(f"input shape is {shown(shape)}; give channels, height and width of one sample")
    c, h, w = (whole(size, "a size of the input shape", 1, MOST_ELEMENTS) for size in shape)
    return c, h, w


def _load(source: str, batch: int | None, input_shape: tuple[int, int, int] | None) -> list[Layer]:
    with importable(source):
        found = _model_of(source, input_shape)
        if found is not None:
            model, shape = found
            return _run(source, model.eval(), shape, batch)
    if input_shape is not None:
        raise InvalidInputError(f"input shape is {input_shape}, but {source} has its own; leave the input shape out")
    layers = _read_table(source)
    return layers if batch is None else [replace(layer, batch_size=batch) for layer in layers]


def _model_of(source: str, input_shape: tuple[int, int, int] | None) -> tuple[nn.Module, tuple[int, int, int]] | None:
    """The model and the (C, H, W) of one sample; ``None`` for a source without a model."""
    if source in NETWORKS:
        # Weights with arbitrary values: on meta tensors a forward pass would load torch's compiler, which takes longer.
        with torch.device("meta"):
            model = build(source)
        return model.to_empty(device="cpu"), input_shape or input_shape_of(source)
    if ":" not in source or Path(source).exists():
        return None
    if input_shape is None:
        raise InvalidInputError(f"{source} needs the shape of one sample; give --input, for example --input 3x224x224")
    return _user_model(source), input_shape


def _read_table(source: str) -> list[Layer]:
    if source in TABLES:
        return read_csv(_DEEPBENCH, only_set=TABLES[source])
    if source.endswith(".csv") or Path(source).is_file():
        return read_csv(Path(source))
    raise InvalidInputError(f"source is {source!r}; {_allowed_sources(source)}")


def _allowed_sources(source: str) -> str:
    names = (*NETWORKS, *TABLES)
    return (
        f"{_hint(source, names)}allowed are {', '.join(names)}, a CSV file of layers, and package.module:factory or "
        "file.py:factory for a model of your own"
    )


def _hint(source: str, names: Iterable[str]) -> str:
    close = get_close_matches(source, [*names], n=1)
    return f"did you mean {close[0]}? " if close else ""


def _user_model(source: str) -> nn.Module:
    with blamed_in_building(source):
        place, _, attribute = source.rpartition(":")
        module = _module_of_file(Path(place)) if _is_file(place) else importlib.import_module(place)
        made = _attribute_of(module, attribute)
        model = made if isinstance(made, nn.Module) else made()
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"{source} gives {type(model).__name__}; it must give a torch.nn.Module")
    return model


def _attribute_of(module: ModuleType, name: str) -> Any:
    """Return what is to make the model. Raises ``InvalidInputError`` with the names that could."""
    if not hasattr(module, name):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        have = f"it has {', '.join(own)}" if own else "it defines nothing"
        raise InvalidInputError(f"there is no {name!r} in {module.__name__}; {have}")
    return getattr(module, name)


def _run(source: str, model: nn.Module, input_shape: tuple[int, int, int], batch: int | None) -> list[Layer]:
    """Layers that one sample runs through, with the batch sizes of ``batch`` samples.

    Some models fold other axes into the batch: so batch sizes are multiples of those with one sample.
    """
    with blamed_in_computing(source, (1, *input_shape)):
        calls = trace(model, arguments_for(source, torch.zeros(1, *input_shape)))
    return [
        Layer(
            (call.name,),
            call.problem.with_operation(Operation.FORWARD),
            call.batch_size * (batch or 1),
            input_needs_gradient=call.input_needs_gradient,
            transposed=call.is_transposed,
            has_bias=call.has_bias,
        )
        for call in calls
    ]


@contextmanager
def importable(source: str) -> Iterator[None]:
    """Let modules in the current folder be imported, as ``python -m`` does, or those beside the file of the source.

    An installed command has its own folder on the path, not the user's. Processes that are started inherit the path.
    """
    place, _, _ = source.rpartition(":")
    folder = str(Path(place).resolve().parent if _is_file(place) else Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _module_of_file(path: Path) -> ModuleType:
    """Import a file as processes can that unpickle what it defines: by its name, from its folder, which is on the path.

    Raises ``InvalidInputError`` where that is another module, and what importing raises.
    """
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}")
    module = importlib.import_module(path.stem)
    if module.__file__ is None or not path.samefile(module.__file__):
        raise InvalidInputError(f"there is another module {path.stem}, {module.__file__}: give the file another name")
    return module


def _is_file(place: str) -> bool:
    """Whether a model's place is a file, ``folder/file.py``, and no module, ``package.module``."""
    return place.endswith(".py")


def _check_columns(path: Path, columns: Iterable[str]) -> None:
    known = (*_REQUIRED, *_OPTIONAL, *_TEXT)
    if missing := [name for name in _REQUIRED if name not in columns]:
        raise InvalidInputError(f"{path}, line 1: no column {', '.join(missing)}; the columns are {', '.join(known)}")
    if unknown := [repr(name) for name in columns if name not in known]:
        raise InvalidInputError(f"{path}, line 1: unknown column {', '.join(unknown)}; allowed are {', '.join(known)}")
    if twice := [name for name, times in Counter(columns).items() if times > 1]:
        raise InvalidInputError(f"{path}, line 1: column {', '.join(twice)} is there more than once; leave one of each")


def _layer(path: Path, number: int, line: Mapping[str, str | None]) -> Layer:
    where = f"{path}, line {number}"
    if None in line or None in line.values():
        raise InvalidInputError(f"{where}: the number of values is not that of the columns in line 1")
    size = {name: _size(where, name, line[name]) for name in _REQUIRED}
    size |= {name: _size(where, name, line.get(name) or default) for name, default in _OPTIONAL.items()}
    try:
        batch_size = whole(size["n"], "n", 1, MOST_SAMPLES)
        names = (line.get("name") or f"line {number}").split(", ")
        return Layer(tuple(names), _problem(size), batch_size, size["count"])
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from None


def _problem(size: Mapping[str, int]) -> ConvProblem:
    c, h, w, k, r, s = (size[name] for name in ("c", "h", "w", "k", "r", "s"))
    return ConvProblem(
        *(Operation.FORWARD, c, h, w, k, r, s),
        (size["stride_h"], size["stride_w"]),
        (size["pad_h"], size["pad_w"]),
        (size["dilation"], size["dilation"]),
        size["groups"],
    )


def _size(where: str, name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise InvalidInputError(f"{where}: {name} is {shown(value)}; write a whole number") from None


def _merged(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Merge equal geometries into one layer.

    The first layer of a network is not merged with a later one, which has one operation more.
    """
    merged: dict[tuple[ConvProblem, int, bool, bool], Layer] = {}
    for layer in layers:
        key = (layer.problem, layer.batch_size, layer.input_needs_gradient, layer.transposed)
        same = merged.get(key)
        merged[key] = layer if same is None else _together(same, layer)
    return tuple(merged.values())


def _together(first: Layer, second: Layer) -> Layer:
    names, count = first.names + second.names, first.count + second.count
    return replace(first, names=names, count=count, has_bias=first.has_bias or second.has_bias)
