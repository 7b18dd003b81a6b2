"""Comparison of inference runtimes, each in its own process, interleaved, on the same model, input and threads.

Each runtime prepares the model in its own way: by export, compilation, freezing or tuning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.results.bounds import kinds_table
from mucudnn.bench.results.columns import Columns, table_of
from mucudnn.bench.results.reading import Header, Line, ResultFolder, with_time
from mucudnn.bench.results.variants import TORCH, Runtime
from mucudnn.bench.results.writing import Row, config_record, open_folder
from mucudnn.bench.suites.shared.apart import Entrant, Ready, contestant, pickled, sampled
from mucudnn.bench.suites.shared.processes import WorkerError
from mucudnn.bench.suites.shared.runtimes import (
    MOST_DIFFERENCE,
    OF_PACKAGES,
    Arrays,
    call_by_package,
    call_by_torch,
    relative_difference,
    require_installed,
    version_of,
)
from mucudnn.bench.suites.shared.step_costs import StepTimes, allocator_peak_bytes, median_by_kind, resident_growth
from mucudnn.core.config import Config
from mucudnn.core.errors import UnavailableError
from mucudnn.core.problem import MemoryFormat, Operation
from mucudnn.core.tables import Table, images_per_s, milliseconds, ratio
from mucudnn.core.terminal import Progress, silent
from mucudnn.core.values import format_bytes
from mucudnn.measuring.clocks import WallClock
from mucudnn.running.devices import current_environment

_Outcome = tuple[Arrays, dict[str, Any]]  # the outputs of the model, with columns of the memory of a call


def prepare_runtime(
    runtime: Runtime, subject: Callable[[], tuple[nn.Module, Tensor]], threads: int, config: Config
) -> Ready[_Outcome]:
    """Load the model and prepare it for calls in one runtime, in a process of its own.

    subject: returns the model and its input.
    config: for mucudnn's tuning.

    Return the function to time, which runs the model once; the model's outputs as arrays, in order, and columns of the
    memory of a call; and a function that splits the seconds of a call by kind of layer. Raises ``UnavailableError`` if
    the runtime is not installed, and any error of the runtime.
    """
    require_installed(runtime)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model, x = subject()
    model.eval()
    # The first call shows what the process grows by.
    call = _call_in(runtime, model, x, threads, config)
    _, grown_bytes = resident_growth(call)
    memory: dict[str, Any] = {"grown_bytes": grown_bytes}
    if runtime not in OF_PACKAGES:  # others have allocators of their own
        memory["peak_bytes"] = allocator_peak_bytes(call)
    # Layers can be timed in place unless a compiler or a graph fuses them.
    is_graph = runtime.is_ours and (config.fuse or config.memory_budget is not None)
    times = StepTimes(call, WallClock()) if runtime.tells_layers and not is_graph else None
    arrays = [np.array(array) for array in call()]  # a graph may leave the first call to the model
    return Ready(call, (arrays, memory), ask=lambda _: {} if times is None else times.kinds())


def _call_in(runtime: Runtime, model: nn.Module, x: Tensor, threads: int, config: Config) -> Callable[[], Arrays]:
    """Return a function that calls the model in this runtime, after export, compilation, freezing or tuning."""
    if runtime in OF_PACKAGES:
        return partial(call_by_package(runtime, model, x, threads), x)
    called: Any = model
    if runtime.is_ours:
        called = mucudnn.optimize(model, x, config, progress=False)
    if runtime is Runtime.TORCH_COMPILE:
        import torch._inductor.config as inductor

        inductor.freezing = True  # This affects only the current process.
    if runtime in (Runtime.TORCH_COMPILE, Runtime.MUCUDNN_COMPILE):
        called = torch.compile(called)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            called(x)
    return partial(call_by_torch(called), x)


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
    progress: Progress = silent,
) -> None:
    """Prepare each runtime in its own process, one after the other, then time their calls of the model, interleaved.

    The rows are written into the folder ``out``; nothing is measured if it has them.

    x: (N, C, H, W), in ``memory_format``.
    config: for mucudnn's tuning; its operations are ignored.
    runtimes: torch is always added, as the reference for outputs.

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
        if folder.known(subject):
            folder.write_summary()
            return
        # Start the runtimes, one after the other.
        entrants: dict[Runtime, Entrant[_Outcome]] = {}
        with pickled((model, x)) as handed, ExitStack() as stack:
            for index, runtime in enumerate(asked):
                progress(f"{runtime} gets ready", index / len(asked) / 2)
                job = partial(prepare_runtime, runtime, handed, torch.get_num_threads(), config)
                entrants[runtime] = Entrant(stack.enter_context(contestant(job)), ready_s=READY_S, sample_s=SAMPLE_S)
            # Time them in turns.
            torchs = entrants[Runtime.TORCH]
            _torchs_outputs(torchs)  # before all are timed in vain
            for done in sampled([entrant.timer.sample for entrant in entrants.values()], rounds):
                progress(f"round {done} of {rounds}", 0.5 + done / rounds / 2)
            # Compare their outputs, and time the kinds of layers.
            expected = _torchs_outputs(torchs)
            rows = []
            for runtime, entrant in entrants.items():
                more: dict[str, Any] = {"version": version_of(runtime)}
                if entrant.result is not None:
                    outputs, memory = entrant.result
                    kinds_s: dict[str, float] = {}  # empty if layers cannot be timed
                    if runtime.tells_layers:
                        with suppress(WorkerError):
                            kinds_s = median_by_kind([entrant.ask(1) for _ in range(_KINDS_ROUNDS + 1)][1:])
                    more |= {
                        "relative_difference": relative_difference(outputs, expected),
                        **memory,
                        "ready_after_s": entrant.ready_after_s,
                        "kinds_s": kinds_s,
                    }
                rows.append(Row(subject, runtime, entrant.samples_s, failure=entrant.failure, more=more))
        folder.add(rows)
        folder.write_summary()


def _torchs_outputs(torchs: Entrant[_Outcome]) -> Arrays:
    """Return the outputs of torch's convolutions. Raises ``UnavailableError`` if torch failed."""
    if torchs.result is None:
        raise UnavailableError(f"PyTorch, with which all others are compared, fails: {torchs.failure}")
    return torchs.result[0]


_LEFT: Columns[Line] = {"runtime": lambda call: call["contestant"], "version": lambda call: call["version"]}
_RIGHT: Columns[Line] = {
    "ms": lambda call: milliseconds(call["time_s"]),
    "images/s": lambda call: images_per_s(call["batch_size"], call["time_s"]),
    "± %": lambda call: f"{call['noise']:.0%}",
    "over PyTorch": lambda call: ratio(call["torch_s"] / call["time_s"]),
    "difference": lambda call: "inf" if call["relative_difference"] is None else f"{call['relative_difference']:.1e}",
    "peak memory": lambda call: "" if call.get("peak_bytes") is None else format_bytes(call["peak_bytes"]),
    "grows by": lambda call: "" if call.get("grown_bytes") is None else format_bytes(call["grown_bytes"]),
    "ready after s": lambda call: f"{call['ready_after_s']:.1f}",
}


def inference_tables(folder: ResultFolder) -> Iterator[Table]:
    """Yield a table of the runtimes, with notes on those that failed or gave different outputs, and of kinds of layers.

    Speedups are over torch.
    """
    lines = [with_time(line) for line in folder.lines]
    torch_s = next(line["time_s"] for line in lines if line["contestant"] == TORCH)
    calls = [{**line, "torch_s": torch_s} for line in lines]
    count = folder.header.environment.threads
    threads = "1 thread" if count == 1 else f"{count} threads"
    shape = "×".join(map(str, folder.header.settings["input_shape"]))
    yield table_of(
        calls,
        f"{folder.header.source}, inference of {shape}, {threads}: runtimes in turns",
        _LEFT,
        _RIGHT,
        caption="\n".join(_notes(folder, calls)),
        failure=lambda call: "" if call["failure"] else None,  # the notes have the reason
    )
    if timed := [call for call in calls if call.get("kinds_s")]:
        yield kinds_table(
            timed,
            folder.header.source,
            {"runtime": itemgetter("contestant")},
            caption="timed in place in separate calls, if layers are not compiled",
        )


def _notes(folder: ResultFolder, calls: Sequence[Line]) -> Iterator[str]:
    timed = [call for call in calls if not call["failure"] and call["relative_difference"] is not None]
    alike = [call for call in timed if call["relative_difference"] <= MOST_DIFFERENCE]  # as torch, up to rounding
    rivals = [call for call in alike if not Runtime(call["contestant"]).is_ours]
    ours = next((call for call in alike if call["contestant"] == Runtime.MUCUDNN), None)
    if rivals and ours is not None:
        best = min(rivals, key=lambda call: float(call["time_s"]))
        fused = "fused" if folder.header.settings["fuse"] else "not fused"
        yield f"fastest other, {best['contestant']} / mucudnn, {fused}: {ratio(best['time_s'] / ours['time_s'])}"
    yield "each in a process of its own; ±: spread (IQR / median); difference: of outputs from PyTorch's, relative L2"
    yield "peak memory: of PyTorch's allocator in a call; grows by: what the first call adds to the process"
    for call in calls:
        if call["failure"]:
            yield f"{call['contestant']} has no time: {call['failure']}"
        elif call not in alike:
            yield f"{call['contestant']} does not compute the same as PyTorch: its time is meaningless"
