"""Random geometries, tuned and run in child processes under checks of the heap: none dies, hangs or is wrong.

One alone: ``MUCUDNN_FUZZ_SEED=123 pytest tests/tuning/test_fuzz_tuned.py``. Run as a program with two numbers, this
file tunes the geometries from one to the other, and says what it begins and how it ended: its parent knows where it
died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
import torch
from support.effort import how_many

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR, Config
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Task
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.measuring.clocks import WallClock
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.proving.prover import checked_environment, open_red_zones
from mucudnn.measuring.proving.trial import check_heap
from mucudnn.measuring.whole_runs import Machine, whole_run
from mucudnn.store.database import Database
from mucudnn.testing.contract import random_problem
from mucudnn.tuning.tuner import tune_tasks

pytestmark = pytest.mark.slow

CHUNK = 100
_MOST_SAMPLES = 16
_RUNS = 3


def geometry(seed: int) -> tuple[ConvProblem, int]:
    """Draw a problem and a batch size, the same for the same seed."""
    random = Random(f"tuned {seed}")
    while (problem := random_problem(random)) is None:
        pass
    return problem, random.randint(1, _MOST_SAMPLES)


def why_wrong(problem: ConvProblem, batch_size: int, machine: Machine) -> str | None:
    """Tune all operations, run what was chosen, and compare; ``None``: all is right."""
    torch.set_num_threads(2)
    problems = [problem.with_operation(operation) for operation in Operation]
    tasks = [Task(one, batch_size, None) for one in problems]
    with Database(":memory:") as database:
        config = Config(workspace_limit=None)
        tuning = tune_tasks(tasks, config, machine=machine, database=database, in_passing=True)
    for tuned in tuning.problems:
        operands = random_operands(tuned.problem, batch_size, seed=1)
        bound = 10 * DEFAULT_MAX_RELATIVE_ERROR[problem.dtype]
        exact = reference(tuned.problem, operands.x, operands.w, operands.y)
        for _ in range(_RUNS):
            error = relative_l2_error(_run(tuned.problem, tuned.configuration, operands), exact)
            if not error <= bound:
                return f"{tuned.problem}, batch {batch_size}: {tuned.configuration}: error {error:.2g}"
    check_heap()
    return None


def _run(problem: ConvProblem, configuration: object, operands: Operands) -> torch.Tensor:
    with torch.no_grad():
        return whole_run(problem, configuration, operands)()  # type: ignore[arg-type]


def main(first: int, end: int) -> None:
    machine = replace(Machine.current(), clock=WallClock())
    for seed in range(first, end):
        problem, batch_size = geometry(seed)
        _say(f"{seed} begun {problem} batch {batch_size}")
        try:
            reason = why_wrong(problem, batch_size, machine)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        _say(f"{seed} {'right' if reason is None else f'wrong {reason}'}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def chunks() -> list[range]:
    if one := os.environ.get("MUCUDNN_FUZZ_SEED"):
        return [range(int(one), int(one) + 1)]
    first, count = int(os.environ.get("MUCUDNN_FUZZ_FIRST", "0")), how_many(8, 5_000)
    return [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]


def run(seeds: range) -> tuple[list[str], int, str]:
    """Run a child on these; returns its lines, its exit status and the last line of its standard error."""
    command = [sys.executable, __file__, str(seeds.start), str(seeds.stop)]
    with open_red_zones() as zones:
        environment = {**checked_environment(zones), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            command, env=environment, pass_fds=[zones.fileno()], capture_output=True, text=True, timeout=1200
        )
    return done.stdout.splitlines(), done.returncode, done.stderr.strip().rpartition("\n")[2]


@pytest.mark.fuzz
@pytest.mark.parametrize("seeds", chunks(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_what_is_tuned_runs_right_and_ends_no_process(seeds: range) -> None:
    failed, left = [], seeds
    while left:
        lines, status, said = run(left)
        failed += [line for line in lines if " wrong " in line]
        if status == 0:
            break
        assert lines, said
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        failed.append(f"{lines[-1]}: {how}, {said}")
        left = range(int(lines[-1].split()[0]) + 1, seeds.stop)
    assert not failed, "\n".join(failed)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
