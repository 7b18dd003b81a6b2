"""Lists cuDNN's engines for one layer by micro-batch size: a table for people, CSV and JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from mucudnn.bench.report.records import Record, stamp
from mucudnn.bench.report.tables import long_name, new_table, short_name
from mucudnn.kernels.cudnn.constants import BehaviorNote, NumericalNote
from mucudnn.kernels.cudnn.device import Device
from mucudnn.kernels.cudnn.engines import Engine, EngineConfig, why_barred
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.torch_settings import TorchSettings
from mucudnn.words.units import format_bytes

_OWN_COLUMNS = (NumericalNote.TENSOR_CORE, NumericalNote.NONDETERMINISTIC)  # notes that have their own columns
_Kind = tuple[EngineConfig, frozenset[NumericalNote], frozenset[BehaviorNote]]


@dataclass(frozen=True, slots=True)
class ListedEngine:
    """A configuration of one of cuDNN's engines, with its workspace for each micro-batch size at which cuDNN offers it.

    engine: the engine as offered at the largest of these sizes. barred: why torch's numeric settings forbid the engine,
    or None.
    """

    engine: Engine
    workspace_bytes: Mapping[int, int]
    barred: str | None


@dataclass(frozen=True, slots=True)
class EngineList:
    """The engines that cuDNN offers for a problem on a device, in cuDNN's order for the largest micro-batch size."""

    names: tuple[str, ...]
    problem: ConvProblem
    micro_batch_sizes: tuple[int, ...]
    device: str
    cudnn: str
    numerics: TorchSettings
    engines: tuple[ListedEngine, ...]

    @property
    def allowed(self) -> int:
        """Number of listed engines that torch's numeric settings allow."""
        return sum(listed.barred is None for listed in self.engines)


def list_engines(
    device: Device,
    names: tuple[str, ...],
    problem: ConvProblem,
    micro_batch_sizes: Sequence[int],
    *,
    every: bool = False,
) -> EngineList:
    """List cuDNN's engines for a problem at ascending micro-batch sizes, and whether torch's settings allow each.

    Raises ``UnavailableError`` if cuDNN offers no engine at any size.

    every: list all engines, as ``Device.engines`` explains.
    """
    numerics = TorchSettings.current()
    found: dict[_Kind, dict[int, Engine]] = {}
    for n in reversed(micro_batch_sizes):
        for engine in _offered(device, problem, n, every):
            key = (engine.config, engine.numerical_notes, engine.behavior_notes)
            found.setdefault(key, {})[n] = engine
    if not found:
        raise UnavailableError(f"cuDNN {device.library.version_text} has no engine for {problem} on {device.name}")
    return EngineList(
        names,
        problem,
        tuple(micro_batch_sizes),
        device.name,
        device.library.version_text,
        numerics,
        tuple(_listed(by_size, numerics, problem.dtype) for by_size in found.values()),
    )


def engines_table(engines: EngineList) -> Table:
    """Return a table with a row for each engine configuration and a workspace column for each micro-batch size."""
    texts = [_texts(listed) for listed in engines.engines]
    shown = [name for name in texts[0] if any(text[name] for text in texts)]
    sizes = [str(n) for n in engines.micro_batch_sizes]
    where = f"{engines.device}, cuDNN {engines.cudnn}, {engines.numerics}"
    printed = new_table(f"{short_name(engines.names)}: {engines.problem}\n{where}", tuple(shown), sizes)
    for column in printed.columns[len(shown) :]:
        column.no_wrap = True
    for text, listed in zip(texts, engines.engines, strict=True):
        needed = (listed.workspace_bytes.get(n) for n in engines.micro_batch_sizes)
        printed.add_row(*(text[name] for name in shown), *("" if b is None else format_bytes(b) for b in needed))
    printed.caption = (
        f"workspace by micro-batch size, blank if cuDNN does not offer it; {len(engines.engines)} engine "
        f"configurations, {engines.allowed} allowed"
    )
    return printed


def engines_record(engines: EngineList) -> Record:
    """Return the JSON object that ``mucudnn engines --json`` writes, with ``workspace_bytes`` by micro-batch size."""
    return {
        **stamp(),
        "device": engines.device,
        "cudnn": engines.cudnn,
        "numerics": asdict(engines.numerics),
        "layer": long_name(engines.names),
        "problem": asdict(engines.problem),
        "micro_batch_sizes": list(engines.micro_batch_sizes),
        "engines": [{**_described(listed), "workspace_bytes": listed.workspace_bytes} for listed in engines.engines],
    }


def engines_rows(engines: EngineList) -> list[Record]:
    """Return the rows of the CSV file: one for each engine configuration and micro-batch size that cuDNN offers."""
    problem = {"layer": long_name(engines.names), "operation": engines.problem.operation.value}
    return [
        {**problem, "micro_batch_size": n, **_described(listed, " "), "workspace_bytes": listed.workspace_bytes[n]}
        for n in engines.micro_batch_sizes
        for listed in engines.engines
        if n in listed.workspace_bytes
    ]


def _offered(device: Device, problem: ConvProblem, n: int, every: bool) -> list[Engine]:
    try:
        return device.engines(problem, n, every=every)
    except CudnnError as error:
        if not error.is_unsupported:
            raise
        return []


def _listed(by_size: Mapping[int, Engine], numerics: TorchSettings, dtype: str) -> ListedEngine:
    engine = by_size[max(by_size)]
    sizes = {n: by_size[n].workspace_bytes for n in sorted(by_size)}
    return ListedEngine(engine, sizes, why_barred(numerics, engine, dtype))


def _described(listed: ListedEngine, joined: str | None = None) -> Record:
    """Return the JSON or CSV columns of an engine.

    joined: separator that joins the engine's notes into one text, for CSV; None keeps them as a list, for JSON.
    """
    engine = listed.engine
    numerical, behavior = _names(engine.numerical_notes), _names(engine.behavior_notes)
    return {
        "engine": engine.config.name,
        "numerical_notes": numerical if joined is None else joined.join(numerical),
        "behavior_notes": behavior if joined is None else joined.join(behavior),
        "deterministic": engine.deterministic,
        "tensor_cores": engine.uses_tensor_cores,
        "barred": listed.barred,
    }


def _texts(listed: ListedEngine) -> dict[str, str]:
    """Return the table cells of an engine by heading. The caller omits columns that are empty in all rows."""
    engine = listed.engine
    return {
        "engine and knobs": engine.config.name,
        "numerical notes": "\n".join(_names(engine.numerical_notes.difference(_OWN_COLUMNS))),
        "behaviour notes": "\n".join(_names(engine.behavior_notes)),
        "deterministic": "yes" if engine.deterministic else "no",
        "tensor\ncores": "yes" if engine.uses_tensor_cores else "no",
        "barred": listed.barred or "",
    }


def _names(notes: Iterable[NumericalNote | BehaviorNote]) -> list[str]:
    return [note.name for note in sorted(notes)]
