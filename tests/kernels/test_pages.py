"""Huge pages: asked for, for whole pages inside a large tensor, and for nothing else."""

from __future__ import annotations

import pytest
import torch

from mucudnn.kernels import pages
from mucudnn.kernels.pages import on_huge_pages

HUGE = 2 * 2**20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(pages, "_advise", lambda: lambda *arguments: calls.append(arguments))
    return calls


def test_only_whole_pages_of_the_tensor_are_asked_for(asked: list[tuple[int, int, int]]) -> None:
    tensor = torch.empty(5 * HUGE + 12345, dtype=torch.uint8)
    assert on_huge_pages(tensor) is tensor
    ((start, length, _),) = asked
    assert start % HUGE == length % HUGE == 0
    assert tensor.data_ptr() <= start
    assert start + length <= tensor.data_ptr() + tensor.numel()
    assert length >= 4 * HUGE


def test_the_system_takes_the_advice_and_the_memory_works() -> None:
    tensor = on_huge_pages(torch.empty(3 * HUGE, dtype=torch.uint8))
    assert tensor.fill_(7).sum(dtype=torch.int64) == 7 * 3 * HUGE


def test_small_tensors_and_other_devices_are_left_alone(asked: list[tuple[int, int, int]]) -> None:
    for tensor in (torch.empty(0), torch.empty(1000), torch.empty(2**30, device="meta")):
        assert on_huge_pages(tensor) is tensor
    assert not asked
