"""The ends of processes that others started: how one ended, and how to end with one's parent. Loads no torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.process import BaseProcess


def how_it_ended(process: BaseProcess) -> str:
    """Say how a process has ended that told nothing: ``killed by SIGSEGV``. It waits for the end."""
    process.join()
    code = process.exitcode or 0
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def end_with_parent() -> None:
    """Have this process end when the one that started it does: nobody else would end it."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
