"""Says where torch's own convolution, or another algorithm, runs instead of what was tuned: once each.

Operators must never stop a training. While measuring, a failure is an error instead: see ``operators.Measured``.
"""

from __future__ import annotations

import warnings

import torch

from mucudnn.running.workspace import release_workspaces

_said: set[str] = set()


def note_lack_of_memory(text: str, device: torch.device) -> None:
    """Say it once. On the CPU what is kept for speed alone is given back: torch's own convolution, which runs next, has
    then as much memory as without this package.
    """
    if device.type == "cpu":
        release_workspaces()
    say_once(text)


def say_once(text: str) -> None:
    """A warning, where it was not given before."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
