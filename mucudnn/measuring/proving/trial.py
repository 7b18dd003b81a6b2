"""Requests to the process that proves foreign code, and the run of one candidate in that process."""

from __future__ import annotations

import ctypes
import pickle
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.operands import operand_bytes
from mucudnn.measuring.proofs import Proof
from mucudnn.measuring.workbench import Workbench
from mucudnn.words.problem import ConvProblem
from mucudnn.words.torch_settings import deterministic_torch

_KEPT_BYTES = 256 * 2**20  # of operands that wait for the next candidate of the same problem
_REPEATED_S = 0.003  # a run as short as that is repeated: some faults do not show each time, and some never do at first
_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Bench:
    """A problem on which candidates are tried, and the settings of torch in the process that requests the trials.

    checks_samples: see ``Workbench``. threads: torch's; deterministic: as of ``deterministic_torch``. limit_s: seconds
    after which a trial hangs. has_bias: y has a bias added, of zeros.
    """

    problem: ConvProblem
    batch_size: int
    device: str
    checks_samples: bool
    threads: int
    deterministic: bool
    limit_s: float
    has_bias: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """Request to try a candidate in the proving process. pickled: its algorithm, where the name is not enough."""

    bench: Bench
    name: str
    micro_batch_size: int
    pickled: bytes | None = None


def run(trial: Trial) -> Proof:
    """Run a candidate on random operands between red zones, and compare its result with float64.

    Raises any error of the candidate.
    """
    torch.set_num_threads(trial.bench.threads)
    with deterministic_torch(trial.bench.deterministic):
        candidate = _candidate(trial)
        bench = _workbench(trial.bench)
        proofs = [bench.proof(candidate, has_bias=trial.bench.has_bias)]
        if proofs[0].time_s < _REPEATED_S:
            proofs += [bench.proof(candidate, has_bias=trial.bench.has_bias) for _ in range(_REPEATS)]
    check_heap(since_last_batch=True)
    worst = max(proofs, key=lambda one: one.relative_error)
    return replace(worst, time_s=min(one.time_s for one in proofs))


def forget() -> None:
    """Free memory that is kept for the next candidate, if it is much."""
    if _workbench.cache_info().currsize and _kept_bytes > _KEPT_BYTES:
        _workbench.cache_clear()
    check_heap()


def check_heap(*, since_last_batch: bool = False) -> None:
    """End the process if anything was written around a block of torch's allocator on the CPU.

    since_last_batch: check only blocks allocated since the last check of all blocks, which is much quicker.
    """
    preloaded = ctypes.CDLL(None)
    if hasattr(preloaded, "red_zones_check"):
        preloaded.red_zones_check(0 if since_last_batch else 1)


_kept_bytes = 0


@lru_cache(maxsize=1)
def _workbench(of: Bench) -> Workbench:
    global _kept_bytes
    _kept_bytes = operand_bytes(of.problem, of.batch_size)
    return Workbench(of.problem, of.batch_size, of.device, checks_samples=of.checks_samples)


def _candidate(trial: Trial) -> Candidate:
    found = algorithm(trial.name, trial.bench.device) if trial.pickled is None else pickle.loads(trial.pickled)
    return Candidate(trial.bench.problem, found, trial.micro_batch_size)
