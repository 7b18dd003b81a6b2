"""A process with everything loaded that forks one ``mucudnn`` command after the other: kills hit its work at once.

Reads lines: JSON of the arguments, answered by the child's process id; then an empty one, answered by its exit status,
which is negative for a signal. Until then the id is not given to another process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from mucudnn.cli.main import main


def run(arguments: list[str], log: Path) -> None:
    """Never returns."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    try:
        main(arguments)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def serve(log: Path) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line), log)
        answer(child)
        sys.stdin.readline()
        answer(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
