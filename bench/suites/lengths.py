"""Inference on inputs of many lengths, as of recordings, by several runtimes; and geometries that are each called once.

All contestants, each in its own process, get the same sequence of inputs, a few of them in each turn. What they do at a
length that is new to them, such as compiling or tuning, is part of their calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from math import ceil
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mucudnn
from mucudnn.bench.results.columns import Columns, table_of
from mucudnn.bench.results.reading import Header, Line, ResultFolder
from mucudnn.bench.results.variants import TORCH, LengthRuntime
from mucudnn.bench.results.writing import Row, config_record, open_folder
from mucudnn.bench.suites.shared.apart import PAUSE_S, Entrant, Ready, contestant, pickled, sampled
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
from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.problem import Operation
from mucudnn.core.tables import Table, milliseconds, ratio
from mucudnn.core.terminal import Progress, silent
from mucudnn.core.values import format_bytes, whole
from mucudnn.enabling.status import Origin
from mucudnn.running.devices import current_environment

FIRST = 20  # calls that are not in the median: until then a runtime may learn the lengths
READY_S, TURN_S = 3600.0, 900.0  # timeouts of a runtime's preparation and of one turn
_TURNS = 20
_CHANNELS, _WIDTH = 4, 6  # of the x of geometries


@dataclass(slots=True)
class Calls:
    """The calls of a contestant, in its process.

    call: takes an input, returns the outputs.
    inputs: of all calls; None for those that the contestant leaves out.
    outputs: of the last call.
    """

    call: Callable[[Any], Arrays]
    inputs: Iterator[Any]
    outputs: Arrays = field(default_factory=list)

    def take(self, count: int) -> dict[str, Any]:
        """Make the next calls; return their seconds, None for those left out, and columns of what is known after them.

        The columns: the process's resident bytes, the outputs of the last call, and what mucudnn has tuned so far.
        """
        samples_s: list[float | None] = []
        for given in islice(self.inputs, count):
            begun_s = perf_counter()
            if given is not None:
                self.outputs = self.call(given)
            samples_s.append(None if given is None else perf_counter() - begun_s)
        status = mucudnn.status()
        return {
            "samples_s": samples_s,
            "resident_bytes": psutil.Process().memory_info().rss,
            "outputs": self.outputs,
            "tuned": sum(problem.decision.origin is Origin.MEASURED for problem in status.problems),
            "spent_s": status.spent_s,
        }


# Lengths


def random_lengths(count: int, most: int, least: int | None = None) -> list[int]:
    """Return random lengths, the same in every run: from ``least``, by default half of ``most``, to ``most``.

    Raises ``InvalidInputError`` if ``least`` is not from 1 to ``most``.
    """
    least = whole(max(1, most // 2) if least is None else least, "the least length", 1, most)
    return Random(0).choices(range(least, most + 1), k=count)


def prepare_lengths(
    runtime: LengthRuntime,
    subject: Callable[[], tuple[nn.Module, Tensor]],
    lengths: Sequence[int],
    tuned: int,
    threads: int,
    config: Config,
) -> Ready[int]:
    """Prepare a runtime for calls of the model at these lengths, in a process of its own.

    subject: returns the model and its longest input.
    tuned: number of lengths that ``MUCUDNN_EACH`` tunes and calls.

    The result is the bytes that are resident before the first call. Raises ``UnavailableError`` if the runtime is not
    installed, and any error of the runtime.
    """
    require_installed(runtime)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model, x = subject()
    model.eval()
    inputs: Iterator[Tensor | None] = (x[..., :length].contiguous() for length in lengths)
    if runtime is LengthRuntime.MUCUDNN_EACH:
        at = {round(FIRST + (index + 1) * (len(lengths) - FIRST) / tuned) - 1 for index in range(tuned)}
        models = {length: copy.deepcopy(model) for length in {lengths[index] for index in at}}
        for length, one in models.items():
            mucudnn.optimize(one, x[..., :length].contiguous(), config, progress=False)
        call = call_by_torch(lambda x: models[x.shape[-1]](x))
        inputs = (_warm(call, x[..., :length]) if index in at else None for index, length in enumerate(lengths))
    elif runtime in OF_PACKAGES:
        call = call_by_package(runtime, model, x, threads, any_length=True)
    elif runtime.is_compiled:
        import torch._inductor.config as inductor

        inductor.freezing = True  # This affects only the current process.
        call = call_by_torch(torch.compile(model, dynamic=runtime is LengthRuntime.TORCH_COMPILE_DYNAMIC))
    else:
        call = call_by_torch(model)
    if runtime is LengthRuntime.MUCUDNN:
        mucudnn.enable(config)
    return Ready(lambda: None, psutil.Process().memory_info().rss, ask=Calls(call, inputs).take)


def _warm(call: Callable[[Tensor], Arrays], x: Tensor) -> Tensor:
    """Call the model, since others have called it just before, and return its input."""
    x = x.contiguous()
    call(x)
    return x


def compare_lengths(
    model: nn.Module,
    x: Tensor,
    lengths: Sequence[int],
    config: Config,
    out: Path,
    *,
    name: str = "model",
    tuned: int = 10,
    runtimes: Sequence[LengthRuntime] = tuple(LengthRuntime),
    progress: Progress = silent,
) -> None:
    """Time each runtime on inputs of these lengths, and write the rows into the folder ``out``, unless it has them.

    x: the longest input, whose last size varies.
    config: for mucudnn's tuning; its operations and database are ignored: each contestant begins with an empty one.
    tuned: number of lengths, after the first 20, that are tuned by themselves, for the bound.
    runtimes: torch is always added, as the reference for outputs.

    A runtime that is not installed, fails, is killed or times out gets a row with the reason, and the others continue.
    Raises ``InvalidInputError`` for too few lengths, ``UnavailableError`` if the model cannot be pickled or torch
    itself fails, and the errors of ``open_folder``.
    """
    if len(lengths) < FIRST + tuned:
        raise InvalidInputError(
            f"lengths are {len(lengths)}; give at least {FIRST + tuned}: the first {FIRST} are not compared, and "
            f"{tuned} of the others are tuned by themselves"
        )
    asked = [runtime for runtime in LengthRuntime if runtime in runtimes or runtime is LengthRuntime.TORCH]
    settings = {
        "input_shape": list(x.shape),
        "lengths": len(lengths),
        "least": min(lengths),
        "most": max(lengths),
        "tuned": tuned,
    }
    with pickled((model, x)) as handed:
        arguments = handed, lengths, tuned, torch.get_num_threads()
        jobs = {runtime: partial(prepare_lengths, runtime, *arguments) for runtime in asked}
        _compare(jobs, len(lengths), config, out, name, settings, progress)


# Geometries


def geometries() -> Iterator[tuple[Tensor, Tensor, dict[str, int]]]:
    """Yield x, w and the options of 9,504 calls of ``conv_transpose2d``, no two of which are alike."""
    generator = torch.Generator().manual_seed(0)
    for r, s, stride, dilation in product(range(1, 5), range(1, 4), range(1, 4), range(1, 4)):
        for extra, padding, groups, height in product(range(max(stride, dilation)), range(3), (1, 2, 4), range(5, 9)):
            x = torch.randn(1, _CHANNELS, height, _WIDTH, generator=generator)
            w = torch.randn(_CHANNELS, _CHANNELS // groups, r, s, generator=generator)
            steps = {"stride": stride, "padding": padding, "dilation": dilation}
            yield x, w, {**steps, "output_padding": extra, "groups": groups}


def prepare_geometries(runtime: LengthRuntime, threads: int, config: Config) -> Ready[int]:
    """Prepare torch or mucudnn for one call of each geometry, as ``prepare_lengths`` does."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    if runtime is LengthRuntime.MUCUDNN:
        mucudnn.enable(config)
    calls = Calls(lambda given: [F.conv_transpose2d(*given[:2], **given[2]).numpy()], geometries())
    return Ready(lambda: None, psutil.Process().memory_info().rss, ask=calls.take)


def compare_geometries(config: Config, out: Path, *, progress: Progress = silent) -> None:
    """Call each geometry once, by torch and with ``mucudnn.enable``; otherwise as ``compare_lengths``."""
    runtimes = LengthRuntime.TORCH, LengthRuntime.MUCUDNN
    jobs = {runtime: partial(prepare_geometries, runtime, torch.get_num_threads()) for runtime in runtimes}
    count = sum(1 for _ in geometries())
    _compare(jobs, count, config, out, "transposed convolutions", {"geometries": count}, progress)


# Turns, rows and tables


def _compare(
    jobs: Mapping[LengthRuntime, Callable[[Config], Ready[int]]],
    count: int,
    config: Config,
    out: Path,
    name: str,
    settings: Mapping[str, Any],
    progress: Progress,
) -> None:
    """Start the contestants, let them make their calls in turns, and write the rows.

    jobs: each takes the config.
    count: number of calls.
    """
    config = replace(config, operations=(Operation.FORWARD,))
    settings = {**settings, "runtimes": [str(runtime) for runtime in jobs], **config_record(config)}
    subject = {"network": name}
    header = Header("lengths", name, settings, current_environment(), tuple(subject), wanted=1)
    with open_folder(out, header) as folder, TemporaryDirectory() as databases, ExitStack() as stack:
        if not folder.known(subject):
            entrants: dict[LengthRuntime, Entrant[int]] = {}
            for index, (runtime, job) in enumerate(jobs.items()):
                progress(f"{runtime} gets ready", index / len(jobs) / 2)
                empty = replace(config, database=Path(databases) / f"{runtime}.sqlite")
                worker = stack.enter_context(contestant(partial(job, empty)))
                entrants[runtime] = Entrant(worker, ready_s=READY_S, sample_s=TURN_S)
            turns: dict[LengthRuntime, list[dict[str, Any]]] = {runtime: [] for runtime in jobs}
            calls = ceil(count / _TURNS)
            takers = [partial(_take, entrant, calls, turns[runtime]) for runtime, entrant in entrants.items()]
            for done in sampled(takers, ceil(count / calls)):
                progress(f"turn {done}", 0.5 + done * calls / count / 2)
            if (failure := entrants[LengthRuntime.TORCH].failure) is not None:
                raise UnavailableError(f"PyTorch, with which all others are compared, fails: {failure}")
            expected = turns[LengthRuntime.TORCH][-1]["outputs"]
            folder.add([_row(subject, entrants[runtime], runtime, turns[runtime], expected) for runtime in jobs])
        folder.write_summary()


def _take(entrant: Entrant[int], calls: int, turns: list[dict[str, Any]]) -> None:
    """Let a contestant make its next calls, and add what it reports; if it fails, it makes no more."""
    if entrant.failure is None:
        sleep(PAUSE_S)
        try:
            turns.append(entrant.ask(calls))
        except WorkerError as error:
            entrant.timer.error = error


def _row(
    subject: Mapping[str, Any],
    entrant: Entrant[int],
    runtime: LengthRuntime,
    turns: Sequence[Mapping[str, Any]],
    expected: Arrays,
) -> Row:
    more: dict[str, Any] = {"version": version_of(runtime), "ready_after_s": entrant.ready_after_s}
    if entrant.failure is not None:
        return Row(subject, runtime, failure=entrant.failure, more=more)
    samples_s = [seconds for turn in turns for seconds in turn["samples_s"]]
    last, at_first = turns[-1], max(0, FIRST * len(turns) // len(samples_s) - 1)
    more |= {
        "at": [index for index, seconds in enumerate(samples_s) if seconds is not None],
        "grown_bytes": last["resident_bytes"] - (entrant.result or 0),
        "later_grown_bytes": last["resident_bytes"] - turns[at_first]["resident_bytes"],
        "relative_difference": relative_difference(last["outputs"], expected),
        **{name: last[name] for name in ("tuned", "spent_s")},
    }
    return Row(subject, runtime, [seconds for seconds in samples_s if seconds is not None], more=more)


_LEFT: Columns[Line] = {"runtime": lambda row: row["contestant"], "version": lambda row: row["version"]}
_RIGHT: Columns[Line] = {
    "total s": lambda row: "" if row["total_s"] is None else f"{row['total_s']:.2f}",
    "over PyTorch": lambda row: "" if row["total_s"] is None else ratio(row["torch_s"] / row["total_s"]),
    "ms": lambda row: milliseconds(row["later_s"]),
    "of each": lambda row: "" if row["of_each"] is None else f"{row['of_each']:.2f}",
    "grows by": lambda row: format_bytes(max(0, row["grown_bytes"])),
    "later by": lambda row: format_bytes(max(0, row["later_grown_bytes"])),
    "difference": lambda row: "inf" if row["relative_difference"] is None else f"{row['relative_difference']:.1e}",
    "tuned": lambda row: str(row["tuned"] or ""),
    "in s": lambda row: f"{row['spent_s']:.1f}" if row["spent_s"] else "",
    "ready after s": lambda row: f"{row['ready_after_s']:.1f}",
}


def lengths_tables(folder: ResultFolder) -> Iterator[Table]:
    """Yield a table of the contestants, with notes on those that failed or gave different outputs."""
    rows = {line["contestant"]: line for line in folder.lines}
    each = rows.get(LengthRuntime.MUCUDNN_EACH, {"failure": "left out"})
    settings, count = folder.header.settings, folder.header.environment.threads
    if "geometries" in settings:
        subject = f"{settings['geometries']} geometries, each called once"
    else:
        shape = "×".join(map(str, settings["input_shape"][:-1]))
        subject = f"inference of {settings['lengths']} lengths, {shape}×({settings['least']} to {settings['most']})"
    notes = [
        f"in turns, each in a process of its own; ms: median of the calls after the first {FIRST}; of each: median of "
        "call / call of mucudnn-each, which has some of the lengths, each tuned by itself",
        f"grows by: the resident memory of the process over all calls; later by: after the first {FIRST}; tuned, in s: "
        "what enable tuned in its calls; difference: of the last outputs from PyTorch's, relative L2",
    ]
    for name, row in rows.items():
        if row["failure"]:
            notes.append(f"{name} has no time: {row['failure']}")
        elif row["relative_difference"] is None or row["relative_difference"] > MOST_DIFFERENCE:
            notes.append(f"{name} does not compute the same as PyTorch: its time is meaningless")
    yield table_of(
        [row if row["failure"] else _with_times(row, each, rows[TORCH]) for row in rows.values()],
        f"{folder.header.source}, {subject}, {count} thread{'s' * (count != 1)}",
        _LEFT,
        _RIGHT,
        caption="\n".join(notes),
        failure=lambda row: "" if row["failure"] else None,  # the notes have the reason
    )


def _with_times(row: Line, each: Line, torchs: Line) -> Line:
    """Return a row with its total, None if it left calls out, torch's, the later median, and its ratio to ``each``."""
    of_call = dict(zip(row["at"], row["samples_s"], strict=True))
    bound = {} if each["failure"] else dict(zip(each["at"], each["samples_s"], strict=True))
    return {
        **row,
        "total_s": sum(row["samples_s"]) if len(row["at"]) == len(torchs["at"]) else None,
        "torch_s": sum(torchs["samples_s"]),
        "later_s": median(seconds for index, seconds in of_call.items() if index >= FIRST),
        "of_each": median(of_call[index] / seconds for index, seconds in bound.items()) if bound else None,
    }
