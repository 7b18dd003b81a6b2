"""The code that runs one candidate in the process that proves foreign code."""

from __future__ import annotations

import ctypes
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import ceil, inf
from pathlib import Path

import torch

from mucudnn.core.torch_settings import TORCHS_OWN, deterministic_torch
from mucudnn.core.values import format_seconds
from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.candidates import Candidate
from mucudnn.measuring.operands import operand_bytes
from mucudnn.measuring.proofs import MALLOC_DEBUG, BarredError, Bench, Fault, Proof, Trial
from mucudnn.measuring.workbench import Workbench

_KEPT_BYTES = 256 * 2**20  # limit on operands cached for the next candidate of the problem
_REPEATED_S = 0.003  # shorter runs are repeated: some faults are intermittent, and some never show in the first run
_REPEATS = 4
_LOOKS = 2
_PERHAPS = 3.0  # multiple of the limit above which a single look is enough
_RIVALS = 2.0  # the limit of ``slow_s`` over that of other algorithms than torch's own, which cannot win
_FEWEST = 2  # samples; torch picks another backend for a single one
_LEAST_S = 0.02  # limit for a few samples, at least: a library may compile for 1 to 20 ms in the first run


def run(trial: Trial) -> Proof:
    """Run a candidate on random operands between red zones, and compare its result with float64.

    Raises any error of the candidate.
    """
    torch.set_num_threads(trial.bench.threads)
    with deterministic_torch(asked=trial.bench.deterministic):
        name, device, pickled = trial.name, trial.bench.device, trial.pickled
        proven = algorithm(name, device) if pickled is None else pickle.loads(pickled)
        candidate = Candidate(trial.bench.problem, proven, trial.micro_batch_size)
        bench = _workbench(trial.bench)
        slow_s = trial.bench.slow_s / (1 if trial.name == TORCHS_OWN else _RIVALS)
        few = max(_FEWEST, ceil(_LEAST_S / slow_s * trial.bench.batch_size))
        if slow_s < inf and trial.micro_batch_size > few:
            _require_speed(bench.stream(replace(candidate, micro_batch_size=few)), few, trial.bench.batch_size, slow_s)
        proofs = [bench.proof(candidate, has_bias=trial.bench.has_bias)]
        if proofs[0].time_s < _REPEATED_S:
            proofs += [bench.proof(candidate, has_bias=trial.bench.has_bias) for _ in range(_REPEATS)]
    check_heap(since_last_batch=True)
    worst = max(proofs, key=lambda proof: proof.relative_error)
    return replace(worst, time_s=min(proof.time_s for proof in proofs))


def _require_speed(step: Callable[[], None], few: int, batch_size: int, slow_s: float) -> None:
    """Raise ``BarredError`` if the mini-batch would take longer than ``slow_s``. step: computes ``few`` samples."""
    least_s = inf
    for _ in range(_LOOKS):  # the first run may compile code, and others may be disturbed
        began_s = time.perf_counter()
        step()
        least_s = min(least_s, (time.perf_counter() - began_s) * batch_size / few)
        if least_s <= slow_s:
            return
        if least_s > _PERHAPS * slow_s:
            break
    taken = format_seconds(least_s * few / batch_size)
    reason = f"it is too slow to measure: {few} of {batch_size} samples took {taken}"
    raise BarredError(reason, Fault.SLOW, least_s)


def forget() -> None:
    """Free the operands cached for the next candidate if they are large, and check the heap."""
    if _workbench.cache_info().currsize and _kept_bytes > _KEPT_BYTES:
        _workbench.cache_clear()
    check_heap()


def check_heap(*, since_last_batch: bool = False) -> None:
    """Abort the process if code wrote outside a block of torch's CPU allocator.

    since_last_batch: check only blocks allocated since the last full check, which is much faster.
    """
    preloaded = ctypes.CDLL(None)
    if hasattr(preloaded, "red_zones_check"):
        preloaded.red_zones_check(0 if since_last_batch else 1)


def heap_checks() -> dict[str, bool]:
    """Return which checks of the heap are active in this process, by their names."""
    red_zones = hasattr(ctypes.CDLL(None), "red_zones_check")
    malloc_debug = MALLOC_DEBUG in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return {"red zones around torch's tensors": red_zones, "glibc's libc_malloc_debug": malloc_debug}


_kept_bytes = 0


@lru_cache(maxsize=1)
def _workbench(bench: Bench) -> Workbench:
    global _kept_bytes
    _kept_bytes = operand_bytes(bench.problem, bench.batch_size)
    return Workbench(bench.problem, bench.batch_size, bench.device)
