"""Layer tables: the convolutions of a network, a published benchmark, a CSV file or the user's own model."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch

from mucudnn.bench.sources.models import blamed_in_computing, checked_shape, importable, model_of
from mucudnn.bench.sources.networks import NETWORKS
from mucudnn.bench.sources.published import TABLES
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import MOST_SAMPLES, ConvProblem, MemoryFormat, Operation, Sizes
from mucudnn.core.values import did_you_mean, flag, instance, member, settle, several, shown, text, whole
from mucudnn.running.problems import problem_operation
from mucudnn.tuning.trace import trace

_DATA = Path(__file__).parent / "data"
_REQUIRED = ("c", "h", "w", "k", "r", "s", "pad_h", "pad_w", "stride_h", "stride_w")
_OF_VOLUMES = {"d": 0, "t": 0, "pad_d": 0, "stride_d": 1}
_OPTIONAL = MappingProxyType({"n": 1, "dilation": 1, "groups": 1, "count": 1, **_OF_VOLUMES})
_TEXT = ("name", "set")


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution geometry that occurs in a network, as its forward problem, with the number of its occurrences.

    names: module names, several if modules have the same geometry; a single string is one name.
    batch_size: samples in a call.
    input_needs_gradient: False for the first layer, which has no BACKWARD_DATA.
    transposed: whether the module is a transposed convolution; its output is then x of the problem, its forward pass
    BACKWARD_DATA, and its dx FORWARD.
    has_bias: whether any of the modules adds a bias; False for layer tables, and ignored by ``==``.

    Raises ``InvalidInputError`` for invalid values, and for batches of more than ``MOST_SAMPLES``.
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
        """The names of all modules of this layer, joined as ``a, b``."""
        return ", ".join(self.names)


@dataclass(frozen=True, slots=True)
class LayerTable:
    """The distinct layers of a network, file or model, in the order of their first call."""

    source: str
    layers: tuple[Layer, ...]

    def problems(self, operations: Iterable[Operation]) -> list[tuple[Layer, ConvProblem]]:
        """Return each layer with the problem of each operation. FORWARD is the forward pass of the layer's module."""
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
    batch_scale: float = 1.0,
    input_shape: Sequence[int] | None = None,
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
) -> LayerTable:
    """Return the convolution layers of a network, table, file or model; equal layers are merged and counted.

    source: a name in ``NETWORKS`` or ``TABLES``, a CSV file of layers (see ``read_csv``), ``package.module:factory`` or
    ``file.py:factory``, where the factory is an ``nn.Module`` or a function without arguments that returns one.
    batch: mini-batch size; if None, the sizes in the table, or 1 for a model.
    batch_scale: factor on the batch sizes; at least one sample remains.
    input_shape: (C, H, W), or of clips (C, D, H, W), of one sample; required for user models, optional for networks,
    and not allowed for tables.
    dtype: of all convolution problems.
    memory_format: of all convolution problems.

    Raises ``InvalidInputError`` if the source cannot be found, read or run, or has no convolution.

    >>> first = load_source("alexnet", batch=32).layers[0]
    >>> print(first.name, first.batch_size, first.problem)
    features.0 32 forward 3x224x224 -> 64, 11x11, stride 4x4, padding 2x2, float32 contiguous
    """
    batch = None if batch is None else whole(batch, "batch", 1, MOST_SAMPLES)
    shape = checked_shape(input_shape)
    # The layers as they are in the source.
    with importable(source):
        built = model_of(source, shape, initialised=False)
        if built is not None:
            model, input_shape = built
            with blamed_in_computing(source, (1, *input_shape)):
                calls = trace(model.eval(), torch.zeros(1, *input_shape))
            # Batch sizes of the calls are multiplied, because some models fold other axes into the batch axis.
            layers = [
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
    if built is None:
        if shape is not None:
            raise InvalidInputError(f"input shape is {shape}, but {source} has its own; leave the input shape out")
        if source in TABLES:
            layers = read_csv(_DATA / "deepbench_conv.csv", only_set=TABLES[source])
        elif source.endswith(".csv") or Path(source).is_file():
            layers = read_csv(Path(source))
        else:
            names = (*NETWORKS, *TABLES)
            raise InvalidInputError(
                f"source is {source!r}; {did_you_mean(source, names)}allowed are {', '.join(names)}, a CSV file of "
                "layers, and package.module:factory or file.py:factory for a model of your own"
            )
        if batch is not None:
            layers = [replace(layer, batch_size=batch) for layer in layers]
    if not layers:
        raise InvalidInputError(f"{source} has no convolution (such as torch.nn.Conv2d) to tune; name another source")
    # The first layer of a network is not merged with later ones of its geometry, which also have BACKWARD_DATA.
    merged: dict[tuple[ConvProblem, int, bool, bool], Layer] = {}
    for layer in layers:
        problem = replace(layer.problem, dtype=dtype, memory_format=memory_format)
        batch_size = max(1, round(min(batch_scale * layer.batch_size, 2 * MOST_SAMPLES)))
        key = (problem, batch_size, layer.input_needs_gradient, layer.transposed)
        layer = replace(layer, problem=problem, batch_size=batch_size)
        if key in merged:
            same = merged[key]
            names = tuple(dict.fromkeys(same.names + layer.names))
            layer = replace(
                layer, names=names, count=same.count + layer.count, has_bias=same.has_bias or layer.has_bias
            )
        merged[key] = layer
    # Layers of different batch sizes that are named by the same geometry get their batch size into the name.
    layers, sharing = [], Counter(layer.names for layer in merged.values())
    for layer in merged.values():
        is_shared = sharing[layer.names] > 1 and layer.name == _geometry(layer.problem)
        layers.append(replace(layer, names=(f"{layer.name} n{layer.batch_size}",)) if is_shared else layer)
    return LayerTable(source, tuple(layers))


def read_csv(path: Path, *, only_set: str | None = None) -> list[Layer]:
    """Read the layers of a CSV file, one per line, with columns c, h, w, k, r, s, pad_h, pad_w, stride_h and stride_w.

    Optional columns: n (batch size), name, dilation, groups, count, set, and of volumes d, t, pad_d and stride_d; the
    order of columns does not matter. A layer without a name is named by its geometry.

    only_set: read only lines with this value of ``set``.

    Raises ``InvalidInputError`` with file and line if the file is invalid.
    """
    allowed = (*_REQUIRED, *_OPTIONAL, *_TEXT)
    try:
        # csv, because error messages need line numbers, and importing pandas takes longer than reading.
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, strict=True)
            columns = reader.fieldnames or ()
            if missing := [name for name in _REQUIRED if name not in columns]:
                raise InvalidInputError(
                    f"{path}, line 1: no column {', '.join(missing)}; the columns are {', '.join(allowed)}"
                )
            if unknown := [repr(name) for name in columns if name not in allowed]:
                raise InvalidInputError(
                    f"{path}, line 1: unknown column {', '.join(unknown)}; allowed are {', '.join(allowed)}"
                )
            if twice := [name for name, times in Counter(columns).items() if times > 1]:
                raise InvalidInputError(
                    f"{path}, line 1: column {', '.join(twice)} occurs more than once; keep one of each"
                )
            lines = [(reader.line_num, line) for line in reader]
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read as a CSV file of layers: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(f"{path} cannot be read as a CSV file of layers: {error}") from error
    return [_layer(f"{path}, line {number}", line) for number, line in lines if only_set in (None, line.get("set"))]


def _layer(where: str, line: Mapping[str, str | None]) -> Layer:
    if None in line or None in line.values():
        raise InvalidInputError(f"{where}: the number of values differs from the number of columns in line 1")
    size: dict[str, int] = {}
    for name in (*_REQUIRED, *_OPTIONAL):
        value = line[name] if name in _REQUIRED else line.get(name) or _OPTIONAL[name]
        try:
            size[name] = int(str(value))
        except ValueError:
            raise InvalidInputError(f"{where}: {name} is {shown(value)}; write a whole number") from None
    try:
        axes = ("d", "h", "w") if size["d"] or size["t"] else ("h", "w")
        problem = ConvProblem(
            Operation.FORWARD,
            c=size["c"],
            h=size["h"],
            w=size["w"],
            k=size["k"],
            r=size["r"],
            s=size["s"],
            d=size["d"],
            t=size["t"],
            groups=size["groups"],
            stride=tuple(size[f"stride_{axis}"] for axis in axes),
            padding=tuple(size[f"pad_{axis}"] for axis in axes),
            dilation=(size["dilation"],) * len(axes),
        )
        names = (line.get("name") or _geometry(problem)).split(", ")
        return Layer(tuple(names), problem, whole(size["n"], "n", 1, MOST_SAMPLES), size["count"])
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}: {error}") from None


def _geometry(problem: ConvProblem) -> str:
    """Return a name for a problem's geometry, such as ``64x54x54 k64 3x3/2 pad 1``, where ``/2`` is the stride."""
    stride, padding, dilation = (
        str(axes[0]) if len({*axes}) == 1 else _by(axes) for axes in (problem.stride, problem.padding, problem.dilation)
    )
    parts = [f"{_by((problem.c, *problem.extent))} k{problem.k} {_by(problem.window)}"]
    parts[0] += "" if stride == "1" else f"/{stride}"
    parts += [f"pad {padding}"] if padding != "0" else []
    parts += [f"dilation {dilation}"] if dilation != "1" else []
    parts += [f"groups {problem.groups}"] if problem.groups > 1 else []
    return " ".join(parts)


def _by(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def with_filters(table: LayerTable, filters: Sequence[Sizes]) -> LayerTable:
    """Keep only layers whose filter size is in ``filters``, as (height, width) or (depth, height, width).

    Raises ``InvalidInputError`` if no layer is left.
    """
    layers = tuple(layer for layer in table.layers if layer.problem.window in filters)
    if not layers:
        windows = sorted({layer.problem.window for layer in table.layers})
        asked, offered = (", ".join(map(_by, sizes)) for sizes in (filters, windows))
        raise InvalidInputError(f"{table.source} has no layer with a filter of {asked}; it has {offered}")
    return replace(table, layers=layers)
