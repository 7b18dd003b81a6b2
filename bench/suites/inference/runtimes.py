"""Compares runtimes in inference: each in a process of its own, in turns, on the same model, input and threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mucudnn.bench.contests.apart import PAUSE_S, OwnProcess, Ready
from mucudnn.bench.contests.kind_times import median_by_kind
from mucudnn.bench.contests.processes import OwnProcessError
from mucudnn.bench.folders.rows import Row
from mucudnn.bench.suites.inference.run import RUNTIMES, InferenceRun
from mucudnn.bench.suites.inference.runtime import Runtime
from mucudnn.bench.suites.inference.runtime_job import RuntimeJob, store_model, version_of
from mucudnn.measuring.timing.timer import EVERY_ROUND, Timer, sample_in_rounds
from mucudnn.words.config import Config
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import Operation
from mucudnn.words.progress import Progress, silent

_Arrays = list[np.ndarray[Any, Any]]
_Process = OwnProcess[_Arrays]

_KINDS_ROUNDS = 3
READY_S, SAMPLE_S = 3600.0, 600.0  # most seconds that a runtime may take
_RULE = replace(EVERY_ROUND, sample_s=0.2)


def compare_runtimes(
    run: InferenceRun,
    model: nn.Module,
    arguments: tuple[Tensor, ...],
    config: Config,
    *,
    runtimes: Sequence[Runtime] = tuple(Runtime),
    job: Callable[..., Callable[[], Ready[_Arrays]]] = RuntimeJob,
    pause_s: float = PAUSE_S,
    progress: Progress = silent,
) -> None:
    """Get each runtime ready in a process of its own, one after the other, and time their calls of the model in turns.

    arguments: all of the model, x (N, C, H, W) the first, in the memory format in which torch and ours read it. config:
    how ours is tuned; its operations do not count. runtimes: torch's own is always one of them, with which outputs are
    compared. job: makes the job of a runtime. pause_s: seconds between samples. What the folder has is not
    measured again.

    A runtime that is not installed, raises, is killed or takes too long has a row with the reason, and the others go
    on. Raises ``UnavailableError`` where the model cannot be pickled, or torch itself fails.
    """
    if run.is_known(RUNTIMES):
        return
    config = replace(config, operations=(Operation.FORWARD,))
    asked = [runtime for runtime in Runtime if runtime in runtimes or runtime is Runtime.TORCH]
    threads = torch.get_num_threads()
    failures: dict[Runtime, str] = {}
    processes: dict[Runtime, _Process] = {}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        file = Path(folder) / "model.pickle"
        store_model(model, arguments, file)
        for index, runtime in enumerate(asked):
            progress(f"{runtime} gets ready", index / len(asked) / 2)
            try:
                its_job = job(runtime, file, threads, config)
                process = OwnProcess(its_job, ready_s=READY_S, sample_s=SAMPLE_S, pause_s=pause_s)
                processes[runtime] = stack.enter_context(process)
            except OwnProcessError as error:
                failures[runtime] = str(error)
        _require_torch(failures)
        timers = {runtime: Timer(process.call, process, _RULE) for runtime, process in processes.items()}
        for done in islice(sample_in_rounds([*timers.values()]), run.rounds):
            progress(f"round {done} of {run.rounds}", 0.5 + done / run.rounds / 2)
        kinds = {runtime: _kinds(process) for runtime, process in processes.items() if runtime.tells_layers}
        failures |= {runtime: str(timer.error) for runtime, timer in timers.items() if timer.error is not None}
        _require_torch(failures)
    subject, torchs = run.subject(RUNTIMES), processes[Runtime.TORCH].found
    rows = []
    for runtime in asked:
        row = Row(subject, runtime, failure=failures.get(runtime), more={"version": version_of(runtime)})
        if runtime not in failures:
            process = processes[runtime]
            more = {
                "relative_difference": relative_difference(process.found, torchs),
                "ready_after_s": process.ready_after_s,
                "kinds_s": kinds.get(runtime, {}),
            }
            row = replace(row, samples_s=timers[runtime].samples_s, more={**row.more, **more})
        rows.append(row)
    run.folder.add(rows)


def _kinds(process: _Process) -> dict[str, float]:
    """Return the seconds of a call by kind of layer; empty where that cannot be told. A first call is not counted."""
    try:
        return median_by_kind([process.ask(1) for _ in range(_KINDS_ROUNDS + 1)][1:])
    except OwnProcessError:
        return {}


def _require_torch(failures: Mapping[Runtime, str]) -> None:
    if Runtime.TORCH in failures:
        raise UnavailableError(f"PyTorch, with which all others are compared, fails: {failures[Runtime.TORCH]}")


def relative_difference(outputs: _Arrays, expected: _Arrays) -> float:
    """Return the L2 norm of the difference over that of what is expected, of all arrays together, in float64.

    It is infinite where shapes differ or numbers are not finite, and where zeros are expected alone.
    """
    if [array.shape for array in outputs] != [array.shape for array in expected]:
        return inf
    found, right = (np.concatenate([each.ravel() for each in one]).astype(np.float64) for one in (outputs, expected))
    difference, norm = float(np.linalg.norm(found - right)), float(np.linalg.norm(right))
    if difference == 0.0:
        return 0.0
    return difference / norm if isfinite(difference) and norm > 0 else inf
