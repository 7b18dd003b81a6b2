"""Processes of tests that are forked off one that has loaded torch."""

import os
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path

_FORKED = ["torch.distributed.fsdp", "mucudnn.optimizing.optimize", "mucudnn.tuning.tuner", "mucudnn.cli.main"]
_FORKED += ["pytest", "mucudnn.bench.suites.inference"]  # what many test files import, too


def forking() -> ForkServerContext:
    """A context of ``multiprocessing`` in which processes start in milliseconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_FORKED)
    return context


def run_command(arguments: list[str], log: Path) -> None:
    """Run ``mucudnn`` in a process of its own, with all output in a file."""
    import torch

    from mucudnn.cli.main import main

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    main(arguments)
