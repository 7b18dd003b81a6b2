"""Benchmarks of memory on CUDA where there is none."""

from __future__ import annotations

import pytest
import torch
from support.command_line import fail

GPU = torch.device("cuda", 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command", [("bench", "training", "alexnet"), ("tune", "alexnet", "--workspace-limit", "headroom")], ids=" ".join
)
def test_without_one_the_commands_say_so_before_anything_is_loaded(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mucudnn.bench.sources.models.load_model", lambda *_, **__: 1 / 0)
    message = fail(*command, "--device", "cuda")
    assert "device is 'cuda', but torch" in message
    assert "use device 'cpu'" in message
