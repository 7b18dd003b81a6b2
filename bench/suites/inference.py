"""Comparison of inference runtimes, each in its own process, interleaved, on the same model, input and threads.

Each runtime prepares the model in its own way: by export, compilation, freezing or tuning. ONNX Runtime and OpenVINO
read the same file, which torch exports. Both are installed by the extra ``runtimes`` and needed only here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import mucudnn
from mucudnn.bench.results.bounds import kinds_table
from mucudnn.bench.results.reading import Header, ResultFolder, Subject
from mucudnn.bench.results.speedups import spread
from mucudnn.bench.results.variants import TORCH, Runtime
from mucudnn.bench.results.writing import Row, config_record, open_folder
from mucudnn.bench.suites.shared.apart import PAUSE_S, Apart, Entrant, OwnProcess, Ready, require_torch, sampled
from mucudnn.bench.suites.shared.peak_memory import allocator_peak_bytes, resident_growth
from mucudnn.bench.suites.shared.processes import OwnProcessError
from mucudnn.bench.suites.shared.step_parts import KindTimes, median_by_kind
from mucudnn.core.config import Config
from mucudnn.core.errors import UnavailableError
from mucudnn.core.problem import MemoryFormat, Operation
from mucudnn.core.tables import Table, images_per_s, milliseconds, new_table, ratio
from mucudnn.core.terminal import Progress, silent
from mucudnn.core.values import format_bytes
from mucudnn.graph.model import BandedModel
from mucudnn.measuring.clocks import WallClock
from mucudnn.running.environment import current_environment

_Arrays = list[np.ndarray[Any, Any]]
_MEMORY, _KINDS = 0, 1  # what a process is asked: columns of the memory of a call, and kinds of layers
_Outputs = Callable[[], _Arrays]  # A function that calls the model once.
_OF_EXPORT = ("onnx", "onnxscript")
_PACKAGES: Mapping[Runtime, tuple[str, ...]] = MappingProxyType(
    {Runtime.ONNX_RUNTIME: ("onnxruntime", *_OF_EXPORT), Runtime.OPENVINO: ("openvino", *_OF_EXPORT)}
)


def version_of(runtime: Runtime) -> str:
    """Return the version of the package that implements this runtime; empty if it is not installed."""
    if runtime.is_ours:
        return mucudnn.__version__
    try:
        return version("torch" if runtime is Runtime.TORCH_COMPILE else runtime.value)
    except PackageNotFoundError:
        return ""


def require_installed(runtime: Runtime) -> None:
    """Raise ``UnavailableError`` if a package of the runtime is not installed."""
    missing = [package for package in _PACKAGES.get(runtime, ()) if find_spec(package) is None]
    if missing:
        raise UnavailableError(f"{', '.join(missing)} not installed: pip install 'mucudnn[runtimes]'")


@dataclass(frozen=True, slots=True)
class RuntimeJob:
    """A picklable job for another process: loads the model and prepares it for calls in one runtime.

    subject: returns the model and its input. config: for mucudnn's tuning. A call of the job returns the function
    to time, which runs the model once; the model's outputs as arrays, in order; and a function that splits the seconds
    of a call by kind of layer.

    Raises ``UnavailableError`` if the runtime is not installed, and any error of the runtime.
    """

    runtime: Runtime
    subject: Callable[[], tuple[nn.Module, Tensor]]
    threads: int
    config: Config

    def __call__(self) -> Ready[_Arrays]:
        require_installed(self.runtime)
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(False)
        model, x = self.subject()
        outputs = _PREPARE[self.runtime](model.eval(), x, self)
        found, grown_bytes = resident_growth(outputs)
        memory = {"grown_bytes": grown_bytes, "front": _front(outputs)}
        if self.runtime not in _PACKAGES:  # others have allocators of their own
            memory["peak_bytes"] = allocator_peak_bytes(outputs)
        kinds = self._kinds(outputs) if self._tells_layers else lambda _: {}
        ask: dict[int, Callable[[int], Any]] = {_MEMORY: lambda _: memory, _KINDS: kinds}
        return Ready(outputs, [np.array(array) for array in found], ask=lambda what: ask[what](what))

    @property
    def _tells_layers(self) -> bool:
        """Whether layers can be timed: those of a graph do not run as modules."""
        is_graph = self.config.fuse or self.config.memory_budget is not None
        return self.runtime.tells_layers and not (self.runtime.is_ours and is_graph)

    def _kinds(self, outputs: _Outputs) -> Callable[[int], dict[str, float]]:
        """Return a function that calls the model once and returns the seconds of each kind of layer."""
        times = KindTimes(outputs, WallClock())
        return lambda _: times.sample()


def _front(outputs: _Outputs) -> list[tuple[int, float]] | None:
    """Return predicted bytes and seconds of a call in bands of rows, for every plan worth having; None without bands.

    The least memory comes first.
    """
    model = outputs.args[0] if isinstance(outputs, partial) else None
    if not isinstance(model, BandedModel):
        return None
    return sorted((plan.memory_bytes, plan.time_s) for plan in model.findings[0].front)


def _torch(model: nn.Module, x: Tensor, job: RuntimeJob) -> _Outputs:
    return partial(_outputs_of, model, x)


def _mucudnn_compile(model: nn.Module, x: Tensor, job: RuntimeJob) -> _Outputs:
    return _compiled(mucudnn.optimize(model, x, job.config, progress=False), x)


def _torch_compile(model: nn.Module, x: Tensor, job: RuntimeJob) -> _Outputs:
    import torch._inductor.config as inductor

    inductor.freezing = True  # This affects only the current process.
    return _compiled(model, x)


def _compiled(model: nn.Module, x: Tensor) -> _Outputs:
    compiled: Any = torch.compile(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(x)
    return partial(_outputs_of, compiled, x)


def _mucudnn(model: nn.Module, x: Tensor, job: RuntimeJob) -> _Outputs:
    return partial(_outputs_of, mucudnn.optimize(model, x, job.config, progress=False), x)


def _onnx_runtime(model: nn.Module, x: Tensor, job: RuntimeJob) -> _Outputs:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = job.threads, 1
    with TemporaryDirectory() as folder:
        file = _exported(model, x, Path(folder))
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: x.contiguous().numpy()}
    return lambda: session.run(None, inputs)


def _openvino(model: nn.Module, x: Tensor, job: RuntimeJob) -> _Outputs:
    import openvino

    core = openvino.Core()
    options = {
        "INFERENCE_NUM_THREADS": job.threads,
        "INFERENCE_PRECISION_HINT": "f32",  # The default is bfloat16 on processors that support it.
        "PERFORMANCE_HINT": "LATENCY",
    }
    with TemporaryDirectory() as folder:
        compiled = core.compile_model(core.read_model(str(_exported(model, x, Path(folder)))), "CPU", options)
    request, inputs = compiled.create_infer_request(), [x.contiguous().numpy()]

    def outputs() -> _Arrays:
        results = request.infer(inputs, share_inputs=True, share_outputs=True)
        return [results[output] for output in compiled.outputs]

    return outputs


_PREPARE: Mapping[Runtime, Callable[[nn.Module, Tensor, RuntimeJob], _Outputs]] = MappingProxyType(
    {
        Runtime.TORCH: _torch,
        Runtime.TORCH_COMPILE: _torch_compile,
        Runtime.ONNX_RUNTIME: _onnx_runtime,
        Runtime.OPENVINO: _openvino,
        Runtime.MUCUDNN: _mucudnn,
        Runtime.MUCUDNN_COMPILE: _mucudnn_compile,
    }
)


def _outputs_of(model: Callable[[Tensor], Any], x: Tensor) -> _Arrays:
    return [leaf.numpy() for leaf in tree_leaves(model(x)) if isinstance(leaf, Tensor)]


def _exported(model: nn.Module, x: Tensor, folder: Path) -> Path:
    """Write the model as an ONNX file, with the shape of x, by torch's graph exporter."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # The exporter warns about missing optional packages.
    file = folder / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), file, dynamo=True, verbose=False)
    return file


ROUNDS = 25
_KINDS_ROUNDS = 3
READY_S, SAMPLE_S = 3600.0, 600.0  # timeouts of a runtime's preparation and of one sample


def compare_runtimes(
    model: nn.Module,
    x: Tensor,
    config: Config,
    out: Path,
    *,
    name: str = "model",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    rounds: int = ROUNDS,
    runtimes: Sequence[Runtime] = tuple(Runtime),
    job: Callable[..., Callable[[], Ready[_Arrays]]] = RuntimeJob,
    pause_s: float = PAUSE_S,
    progress: Progress = silent,
) -> None:
    """Prepare each runtime in its own process, one after the other, then time their calls of the model, interleaved.

    The rows are written into the folder ``out``; nothing is measured if it has them. x: (N, C, H, W), in
    ``memory_format``. config: for mucudnn's tuning; its operations are ignored. runtimes: torch is always added, as the
    reference for outputs. job: makes the job of a runtime. pause_s: seconds between samples.

    A runtime that is not installed, fails, is killed or times out gets a row with the reason, and the others continue.
    Raises ``UnavailableError`` if the model cannot be pickled or torch itself fails, and the errors of ``open_folder``.
    """
    config = replace(config, operations=(Operation.FORWARD,))
    asked = [runtime for runtime in Runtime if runtime in runtimes or runtime is Runtime.TORCH]
    subject = {"network": name, "batch_size": len(x), "memory_format": str(memory_format)}
    settings = {
        "input_shape": list(x.shape),
        "rounds": rounds,
        "runtimes": [str(runtime) for runtime in asked],
        **config_record(config),
    }
    header = Header("inference", name, settings, current_environment(), subject_columns=tuple(subject), wanted=1)
    with open_folder(out, header) as folder:
        if not folder.known(subject):
            folder.add(_measured(subject, (model, x), asked, config, rounds, job, pause_s, progress))
        folder.write_summary()


def _measured(
    subject: Subject,
    called: tuple[nn.Module, Tensor],
    runtimes: Sequence[Runtime],
    config: Config,
    rounds: int,
    job: Callable[..., Callable[[], Ready[_Arrays]]],
    pause_s: float,
    progress: Progress,
) -> list[Row]:
    entrants = dict[Runtime, Entrant[_Arrays]]()
    with Apart(ready_s=READY_S, sample_s=SAMPLE_S, pause_s=pause_s) as apart:
        handed = apart.handed(called)
        for index, runtime in enumerate(runtimes):
            progress(f"{runtime} gets ready", index / len(runtimes) / 2)
            entrants[runtime] = Entrant.started(apart, job(runtime, handed, torch.get_num_threads(), config))
        require_torch(entrants[Runtime.TORCH])
        for done in sampled(entrants.values(), rounds):
            progress(f"round {done} of {rounds}", 0.5 + done / rounds / 2)
        require_torch(entrants[Runtime.TORCH])
        torchs = entrants[Runtime.TORCH].found or []
        return [_row(subject, runtime, entrant, torchs) for runtime, entrant in entrants.items()]


def _row(subject: Subject, runtime: Runtime, entrant: Entrant[_Arrays], torchs: _Arrays) -> Row:
    more: dict[str, Any] = {"version": version_of(runtime)}
    if entrant.process is not None and entrant.found is not None:
        more |= {
            "relative_difference": relative_difference(entrant.found, torchs),
            **_memory(entrant.process),
            "ready_after_s": entrant.process.ready_after_s,
            "kinds_s": _kinds(entrant.process) if runtime.tells_layers else {},
        }
    return Row(subject, runtime, entrant.samples_s, failure=entrant.failure, more=more)


def _memory(process: OwnProcess[_Arrays]) -> dict[str, Any]:
    try:
        columns: dict[str, Any] = process.ask(_MEMORY)
    except OwnProcessError:
        return {}
    return columns


def _kinds(process: OwnProcess[_Arrays]) -> dict[str, float]:
    """Return the median seconds of each kind of layer in a call of the runtime; empty if layers cannot be timed."""
    try:
        return median_by_kind([process.ask(_KINDS) for _ in range(_KINDS_ROUNDS + 1)][1:])
    except OwnProcessError:
        return {}


def relative_difference(outputs: _Arrays, expected: _Arrays) -> float:
    """Return the L2 norm of ``outputs - expected`` over that of ``expected``, over all arrays together, in float64.

    The result is infinite if shapes differ, if outputs are not finite, or if ``expected`` is all zeros.
    """
    if [array.shape for array in outputs] != [array.shape for array in expected]:
        return inf
    found, right = (np.concatenate([each.ravel() for each in one]).astype(np.float64) for one in (outputs, expected))
    difference, norm = float(np.linalg.norm(found - right)), float(np.linalg.norm(right))
    if difference == 0.0:
        return 0.0
    return difference / norm if isfinite(difference) and norm > 0 else inf


MOST_DIFFERENCE = 1e-3  # Larger relative differences of float32 outputs count as errors, smaller ones as rounding.

_Cell = Mapping[str, Any]  # a row, with ``time_s``, ``noise``, ``speedup`` over torch and ``batch_size``

_COLUMNS: Mapping[str, Callable[[_Cell], str]] = {
    "ms": lambda one: milliseconds(one["time_s"]),
    "images/s": lambda one: images_per_s(one["batch_size"], one["time_s"]),
    "± %": lambda one: f"{one['noise']:.0%}",
    "over PyTorch": lambda one: ratio(one["speedup"]),
    "difference": lambda one: "inf" if one["relative_difference"] is None else f"{one['relative_difference']:.1e}",
    "peak memory": lambda one: _size(one.get("peak_bytes")),
    "grows by": lambda one: _size(one.get("grown_bytes")),
    "ready after s": lambda one: f"{one['ready_after_s']:.1f}",
}


def inference_tables(folder: ResultFolder) -> Iterator[Table]:
    """Yield tables of the runtimes, and of time by kind of layer."""
    runtimes = [{**line, **spread(line["samples_s"])} for line in folder.lines]
    torch_s = next(one["time_s"] for one in runtimes if one["contestant"] == TORCH)
    runtimes = [{**one, "speedup": None if one["failure"] else torch_s / one["time_s"]} for one in runtimes]
    yield _runtimes_table(folder, runtimes)
    if known := [one for one in runtimes if one.get("kinds_s")]:
        rows = [((one["contestant"],), one["kinds_s"]) for one in known]
        table = kinds_table(folder.header.source, ("runtime",), rows)
        table.caption = "timed in place in separate calls, if layers are not compiled"
        yield table


def _runtimes_table(folder: ResultFolder, runtimes: Sequence[_Cell]) -> Table:
    """Return a table with a row for each runtime, and notes on runtimes that failed or gave different outputs."""
    count = folder.header.environment.threads
    threads = "1 thread" if count == 1 else f"{count} threads"
    shape = "×".join(map(str, folder.header.settings["input_shape"]))
    title = f"{folder.header.source}, inference of {shape}, {threads}: runtimes in turns"
    table = new_table(title, ("runtime", "version"), [*_COLUMNS])
    for one in runtimes:
        cells = ("" for _ in _COLUMNS) if one["failure"] else (cell(one) for cell in _COLUMNS.values())
        table.add_row(one["contestant"], one["version"], *cells)
    table.caption = "\n".join(_notes(folder, runtimes))
    return table


def _notes(folder: ResultFolder, runtimes: Sequence[_Cell]) -> Iterator[str]:
    others = [one for one in runtimes if _computes_the_same(one) and not Runtime(one["contestant"]).is_ours]
    ours = next((one for one in runtimes if one["contestant"] == Runtime.MUCUDNN and _computes_the_same(one)), None)
    if others and ours is not None:
        best = min(others, key=lambda one: float(one["time_s"]))
        fused = "fused" if folder.header.settings["fuse"] else "not fused"
        yield f"fastest other, {best['contestant']} / mucudnn, {fused}: {ratio(best['time_s'] / ours['time_s'])}"
    yield "each in a process of its own; ±: spread (IQR / median); difference: of outputs from PyTorch's, relative L2"
    yield "peak memory: of PyTorch's allocator in a call; grows by: what the first call adds to the process"
    for one in runtimes:
        if one["failure"]:
            yield f"{one['contestant']} has no time: {one['failure']}"
        elif not _computes_the_same(one):
            yield f"{one['contestant']} does not compute the same as PyTorch: its time is meaningless"


def _computes_the_same(one: _Cell) -> bool:
    """Return whether a runtime has a time and its outputs equal torch's up to rounding.

    A missing difference counts as infinite.
    """
    difference = one.get("relative_difference")
    return not one["failure"] and difference is not None and difference <= MOST_DIFFERENCE


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_bytes(size_bytes)
