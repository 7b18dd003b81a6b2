"""Says where torch's own convolution, or another algorithm, runs instead of what was tuned: once each.

Operators must never stop a training. While measuring, a failure is an error instead: see ``operators.Measured``.
"""

from __future__ import annotations

import torch

from mucudnn.running.workspace import release_workspaces
from mucudnn.words.warning import say_once


def note_lack_of_memory(text: str, device: torch.device) -> None:
    """Say it once, and on the CPU give back what is kept for speed alone.

    Torch's own convolution, which runs next, then has as much memory as without this package.
    """
    if device.type == "cpu":
        release_workspaces()
    say_once(text)
