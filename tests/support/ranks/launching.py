"""Starting the ranks of a process group under a hard time limit, all of which end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import NoReturn

from support.places import TESTS

TIME_LIMIT_S = 300.0  # far more than any of them takes
_GRACE_S = 5.0  # between asking a process to end and killing it

# Without it workers of torch 2.13 that torchrun restarts find the addresses of those before them, and gloo gives up.
_NEW_STORE_FOR_A_RESTART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(*arguments: object, ranks: int, limit_s: float = TIME_LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run torchrun's own entry point on this machine."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return run(*launcher, *arguments, limit_s=limit_s)


def end() -> NoReturn:
    """End a rank that has done all it should: torch's threads sometimes abort a process that ends as usual."""
    sys.stdout.flush()
    os._exit(0)


def run(*arguments: object, limit_s: float = TIME_LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run Python; whatever it started is killed at the end."""
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MUCUDNN_WATCH": "0"}
    environment |= _NEW_STORE_FOR_A_RESTART
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    finally:
        _end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def _end(process: subprocess.Popen[str]) -> None:
    """Ask it first: torchrun ends its ranks, which are in sessions of their own."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
