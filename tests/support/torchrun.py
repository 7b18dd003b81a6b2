"""Starts ranks through torchrun's real entry point, under a hard limit of time."""

from __future__ import annotations

import os
import subprocess
import sys

_LIMIT_S = 300


def torchrun(ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script, or ``-m`` and a module, on so many ranks of one thread each, and wait for all of them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
