"""Starts ranks through torchrun's real entry point, under a hard limit of time."""

from __future__ import annotations

import os
import subprocess
import sys

_LIMIT_S = 300


def torchrun(ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script, or ``-m`` and a module, on so many ranks of one thread each, and wait for all of them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with process:
        try:
            output, errors = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # and not kill: torchrun ends its ranks then
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
