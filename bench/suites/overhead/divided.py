"""``python -m mucudnn.bench.suites.overhead.divided``: times a divided call beyond the steps of its micro-batches.

A call of eight equal micro-batches is timed against the same eight steps of the algorithm alone, on the same slices.
Both are called from Python. On CUDA both are also replayed from a CUDA graph, several times in a row, so that only the
device is timed.

Beyond the steps, a call has the workspace, what is opened and closed once, and the bookkeeping in Python. A step of
BACKWARD_FILTER contains the addition of its dw to the sum. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Self

import click
import torch

from mucudnn.bench.contests.timing import Contestant, time_in_turns
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import FolderWriter, open_folder
from mucudnn.bench.report.export import write_json
from mucudnn.bench.report.records import Record, origin
from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.kernels.registry import algorithm, sources
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.timing.synchronized_clock import wall_clock
from mucudnn.measuring.timing.timer import Clock
from mucudnn.running.checked_run import run
from mucudnn.running.environment import current_environment
from mucudnn.terminal.console import output
from mucudnn.terminal.files import FileCommand, OutputFile, OutputFolder
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig

MICRO_BATCHES = 8
COPIES = 10  # calls in a row in one graph, so that starting the graph weighs little
ROUNDS = 31
_GEOMETRY = ConvProblem(Operation.FORWARD, 64, 28, 28, 64, 3, 3, padding=(1, 1))
MICRO_BATCH_SIZES = {"cuda": {"small": 1, "large": 64}, "cpu": {"small": 1, "large": 2}}
_ON_CPU = "gemm"
_COLUMNS = ("size", "operation", "algorithm", "micro_batch_size", "in_graph")  # of a result folder
_DIVIDED, _ALONE = "divided call", "steps alone"

Kind = tuple[str, Operation, str, int, bool]  # values of ``_COLUMNS``


@dataclass(frozen=True, slots=True)
class Overhead:
    """Times of one divided problem. ``in_graph``: replayed from a CUDA graph instead of called from Python.

    call_s, steps_s: seconds of one call of all micro-batches, and of their steps alone. They are medians over the
    rounds. call_samples_s, steps_samples_s: the same, one a round.
    """

    size: str
    operation: Operation
    algorithm: str
    micro_batch_size: int
    in_graph: bool
    call_s: float
    steps_s: float
    call_samples_s: tuple[float, ...] = field(default=(), compare=False, repr=False)
    steps_samples_s: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, kind: Kind, call_samples_s: Sequence[float], steps_samples_s: Sequence[float]) -> Self:
        """Return the medians of samples."""
        medians = median(call_samples_s), median(steps_samples_s)
        return cls(*kind, *medians, tuple(call_samples_s), tuple(steps_samples_s))

    @property
    def per_micro_batch_s(self) -> float:
        return (self.call_s - self.steps_s) / MICRO_BATCHES


def measure_overheads(
    device: str,
    rounds: int = ROUNDS,
    clock: Clock | None = None,
    known: Callable[[Kind], Overhead | None] = lambda _: None,
) -> Iterator[Overhead]:
    """Measure every operation of a small and a large problem, in graphs only on CUDA. Yields each when it is measured.

    clock: ``None``: a wall clock. known: returns what is not to be measured again. Raises ``UnavailableError`` for a
    device that is not there.
    """
    current_environment(device)  # raises with what is missing
    clock = clock or wall_clock(device)
    for size, n in MICRO_BATCH_SIZES[device].items():
        for operation in Operation:
            problem = _GEOMETRY.with_operation(operation)
            chosen = _algorithm(problem, n, device)
            for in_graph in (False, True) if device == "cuda" else (False,):
                kind = size, operation, chosen.name, n, in_graph
                yield known(kind) or Overhead.of(kind, *_samples(problem, chosen, n, device, in_graph, rounds, clock))


def _algorithm(problem: ConvProblem, n: int, device: str) -> Algorithm:
    """The first that a source offers, where the device has one."""
    if device == "cpu":
        return algorithm(_ON_CPU)
    offered = [engine for source in sources(device) for engine in source.offered(problem, [n])]
    if not offered:
        raise UnavailableError(f"nothing is offered for {n} sample(s) of {problem} that torch's settings allow")
    return offered[0]


def _samples(
    problem: ConvProblem, chosen: Algorithm, n: int, device: str, in_graph: bool, rounds: int, clock: Clock
) -> Iterator[list[float]]:
    """Yield the seconds of a call and of its steps, round by round, in turns."""
    operands = random_operands(problem, n * MICRO_BATCHES, device)
    works = _call(problem, chosen, n, operands), _steps(problem, chosen, n, operands)
    repeated = [_captured(work) if in_graph else work for work in works]
    for one in time_in_turns([*map(Contestant, repeated)], rounds, clock):
        yield [sample / (COPIES if in_graph else 1) for sample in one.samples_s]


def _call(problem: ConvProblem, chosen: Algorithm, n: int, operands: Operands) -> Callable[[], None]:
    """A divided call, as a configuration runs it."""
    configuration = Configuration((MicroConfig(chosen.name, n),) * MICRO_BATCHES, time_s=0.0, workspace_bytes=0)
    return lambda: run(problem, configuration, operands.x, operands.w, operands.y)


def _steps(problem: ConvProblem, chosen: Algorithm, n: int, operands: Operands) -> Callable[[], None]:
    """A call of the steps alone, opened beforehand."""
    needed = chosen.workspace(problem, n)
    prepared, scratch = (
        torch.empty(size, dtype=torch.uint8, device=operands.x.device)
        for size in (needed.prepared_bytes, needed.scratch_bytes)
    )
    chosen.open(problem, operands.w, prepared)

    def steps() -> None:
        for x, y in operands.slices(n):
            chosen.step(problem, x, operands.w, y, None, prepared, scratch)

    return steps


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """A call that replays ``COPIES`` of the work from a CUDA graph. The work is run once before, to build caches."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES):
            work()
    return graph.replay


def overhead_record(overheads: list[Overhead], device: str) -> Record:
    """The object that ``--json`` writes."""
    return {
        **origin(current_environment(device), datetime.now(UTC)),
        "micro_batches": MICRO_BATCHES,
        "overheads": [_row(each) for each in overheads],
    }


def _row(overhead: Overhead) -> Record:
    row = {name: value for name, value in asdict(overhead).items() if not name.endswith("_samples_s")}
    return {**row, "per_micro_batch_s": overhead.per_micro_batch_s}


def _header(device: str, rounds: int) -> Header:
    wanted = len(MICRO_BATCH_SIZES[device]) * len(Operation) * (2 if device == "cuda" else 1)
    settings = {"micro_batches": MICRO_BATCHES, "rounds": rounds}
    environment = current_environment(device)
    return Header("overhead", "divided calls", settings, environment, subject_columns=_COLUMNS, wanted=wanted)


def _subject(kind: Kind) -> Subject:
    return dict(zip(_COLUMNS, kind, strict=True))


def _known(folder: FolderWriter | None, kind: Kind) -> Overhead | None:
    """Return what an earlier run measured; ``None``: nothing."""
    lines = [] if folder is None else folder.known(_subject(kind))
    samples = {line["contestant"]: line["samples_s"] for line in lines}
    return Overhead.of(kind, samples[_DIVIDED], samples[_ALONE]) if samples else None


def _add(folder: FolderWriter, overhead: Overhead) -> None:
    """Add what an earlier run has not measured."""
    kind = overhead.size, overhead.operation, overhead.algorithm, overhead.micro_batch_size, overhead.in_graph
    samples = {_ALONE: overhead.steps_samples_s, _DIVIDED: overhead.call_samples_s}
    if not folder.known(_subject(kind)):
        folder.add([Row(_subject(kind), name, samples_s) for name, samples_s in samples.items()])


@click.command(cls=FileCommand)
@click.option("--device", type=click.Choice(list(MICRO_BATCH_SIZES)), default="cpu", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True, help="Samples of each.")
@click.option("--json", "json_file", type=OutputFile(), help="Write them here, too.")
@click.option("--out", type=OutputFolder(), help="Keep all samples in this result folder; what it has is not measured.")
def main(device: str, rounds: int, json_file: Path | None, out: Path | None) -> None:
    """Measure what a divided call costs for each of its eight micro-batches, beyond their steps."""
    console, done = output(), list[Overhead]()
    with ExitStack() as stack:
        folder = None if out is None else stack.enter_context(open_folder(out, _header(device, rounds)))
        for each in measure_overheads(device, rounds, known=partial(_known, folder)):
            done.append(each)
            how = "in a CUDA graph" if each.in_graph else "called from Python"
            console.print(
                f"{each.size} {each.operation}, {each.algorithm}, {MICRO_BATCHES} x {each.micro_batch_size}, {how}: "
                f"{each.per_micro_batch_s * 1e6:+.2f} us a micro-batch over {each.steps_s / MICRO_BATCHES * 1e6:.1f} us"
            )
            if folder is not None:
                _add(folder, each)
            if json_file is not None:
                write_json(json_file, overhead_record(done, device))
        if folder is not None:
            folder.write_summary()


if __name__ == "__main__":
    main()
