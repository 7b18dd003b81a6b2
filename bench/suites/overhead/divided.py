"""The program ``python -m mucudnn.bench.suites.overhead.divided``: the overhead of a call divided into micro-batches.

A call of eight equal micro-batches is timed against eight steps of the algorithm alone on the same slices, one for each
micro-batch. Both are run from Python. On CUDA both are also replayed from a CUDA graph, several times in a row, so that
only the device is timed.

The overhead consists of allocating the workspace, the algorithm's ``open`` and ``close``, and bookkeeping in Python. A
step of BACKWARD_FILTER includes the addition of its dw to the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch

from mucudnn.bench.contests.timing import Contestant, time_in_turns
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.folders.rows import Row, Subject
from mucudnn.bench.folders.writing import write_missing
from mucudnn.bench.report.export import write_json
from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.kernels.registry import algorithm, sources
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.timing.cuda_clock import wall_clock
from mucudnn.measuring.timing.timer import Clock
from mucudnn.running.environment import current_environment
from mucudnn.running.executable import Executable
from mucudnn.terminal.console import output
from mucudnn.terminal.files import FileCommand, OutputFile, OutputFolder
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress
from mucudnn.words.results import Configuration, MicroConfig

MICRO_BATCHES = 8
COPIES = 10  # number of calls in one graph, so that the graph's launch time is negligible
ROUNDS = 31
_GEOMETRY = ConvProblem(Operation.FORWARD, 64, 28, 28, 64, 3, 3, padding=(1, 1))
MICRO_BATCH_SIZES = {"cuda": {"small": 1, "large": 64}, "cpu": {"small": 1, "large": 2}}
_ON_CPU = "gemm"
_COLUMNS = ("size", "operation", "algorithm", "micro_batch_size", "in_graph")
_DIVIDED, _ALONE = "divided call", "steps alone"


def benchmark_divided(out: Path, device: str, rounds: int = ROUNDS, clock: Clock | None = None) -> None:
    """Measure the overhead of divided calls, for every operation of a small and a large problem, into ``out``.

    On CUDA, calls are also timed in CUDA graphs. Rows that the folder already has are not measured again. clock: a wall
    clock by default. Raises ``UnavailableError`` for a missing device, and the errors of ``open_folder``.
    """
    environment = current_environment(device)  # Raises an error if the device is missing.
    clock = clock or wall_clock(device)

    def rows_of(problem: ConvProblem, chosen: Algorithm, subject: Subject, progress: Progress) -> list[Row]:
        n, in_graph = subject["micro_batch_size"], subject["in_graph"]
        call_s, steps_s = _samples(problem, chosen, n, device, in_graph, rounds, clock)
        return [Row(subject, _ALONE, steps_s), Row(subject, _DIVIDED, call_s)]

    wanted = {}
    for size, n in MICRO_BATCH_SIZES[device].items():
        for problem in map(_GEOMETRY.with_operation, Operation):
            chosen = _algorithm(problem, n, device)
            for in_graph in (False, True) if device == "cuda" else (False,):
                values = size, str(problem.operation), chosen.name, n, in_graph
                wanted[values] = partial(rows_of, problem, chosen)
    settings = {"micro_batches": MICRO_BATCHES, "rounds": rounds}
    write_missing(out, Header("overhead", "divided calls", settings, environment, _COLUMNS, len(wanted)), wanted)


def overheads_s(folder: ResultFolder) -> Iterator[tuple[Subject, float, float]]:
    """Yield tuples of the columns of a benchmarked case, its median overhead per micro-batch and median step time."""
    rows = folder.rows.set_index("contestant")
    for alone, divided in zip(*(rows.loc[[name]].to_dict("records") for name in (_ALONE, _DIVIDED)), strict=True):
        step_s = alone["time_s"] / MICRO_BATCHES
        yield {name: alone[name] for name in _COLUMNS}, divided["time_s"] / MICRO_BATCHES - step_s, step_s


def _algorithm(problem: ConvProblem, n: int, device: str) -> Algorithm:
    """Return the algorithm to measure: on the CPU a fixed one, else the first that a library offers for the device.

    Raises ``UnavailableError`` if no library offers one.
    """
    if device == "cpu":
        return algorithm(_ON_CPU)
    offered = [engine for source in sources(device) for engine in source.offered(problem, [n])]
    if not offered:
        raise UnavailableError(f"nothing is offered for {n} sample(s) of {problem} that PyTorch's settings allow")
    return offered[0]


def _samples(
    problem: ConvProblem, chosen: Algorithm, n: int, device: str, in_graph: bool, rounds: int, clock: Clock
) -> Iterator[list[float]]:
    """Yield for each round the seconds of a divided call and those of its steps alone, timed interleaved."""
    operands = random_operands(problem, n * MICRO_BATCHES, device)
    works = _call(problem, chosen, n, operands), _steps(problem, chosen, n, operands)
    repeated = [_captured(work) if in_graph else work for work in works]
    for one in time_in_turns([*map(Contestant, repeated)], rounds, clock):
        yield [sample / (COPIES if in_graph else 1) for sample in one]


def _call(problem: ConvProblem, chosen: Algorithm, n: int, operands: Operands) -> Callable[[], None]:
    """Return a function that computes the convolution by a configuration of ``MICRO_BATCHES`` micro-batches."""
    configuration = Configuration((MicroConfig(chosen.name, n),) * MICRO_BATCHES, time_s=0.0, workspace_bytes=0)
    executable = Executable.of(problem, configuration, device_type=operands.x.device.type)
    executable.build()
    return lambda: executable.execute(operands.x, operands.w, operands.y)


def _steps(problem: ConvProblem, chosen: Algorithm, n: int, operands: Operands) -> Callable[[], None]:
    """Return a function that runs the algorithm's step on each micro-batch, without ``open`` and other overhead."""
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
    """Return a function that replays ``COPIES`` runs of ``work`` from a CUDA graph, captured after one warm-up run."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES):
            work()
    return graph.replay


@click.command(cls=FileCommand)
@click.option("--device", type=click.Choice(list(MICRO_BATCH_SIZES)), default="cpu", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True, help="Samples of each call.")
@click.option("--json", "json_file", type=OutputFile(), help="Also write the samples to this file.")
@click.option("--out", type=OutputFolder(), help="Result folder; rows that it has are not measured again.")
def main(device: str, rounds: int, json_file: Path | None, out: Path | None) -> None:
    """Measure the overhead of a divided call for each of its eight micro-batches."""
    with ExitStack() as stack:
        path = out or Path(stack.enter_context(TemporaryDirectory()))
        benchmark_divided(path, device, rounds)
        folder = read_folder(path)
    for of, overhead_s, step_s in overheads_s(folder):
        how = "in a CUDA graph" if of["in_graph"] else "called from Python"
        output().print(
            f"{of['size']} {of['operation']}, {of['algorithm']}, {MICRO_BATCHES} x {of['micro_batch_size']}, {how}: "
            f"{overhead_s * 1e6:+.2f} us a micro-batch over {step_s * 1e6:.1f} us"
        )
    if json_file is not None:
        write_json(json_file, folder.to_json())


if __name__ == "__main__":
    main()
