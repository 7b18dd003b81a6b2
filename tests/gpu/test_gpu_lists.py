"""The list of engines that cuDNN gives on a GPU, beside that for a description of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.cudnn.recording import MICRO_BATCH_SIZES, recorded_problems

from mucudnn.kernels.cudnn.device import Device, current_device, described_device
from mucudnn.kernels.cudnn.engines import Engine
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.words.problem import ConvProblem


def engines_by_name(device: Device, problem: ConvProblem, n: int) -> dict[str, Engine]:
    """Best first; none where cuDNN cannot compute the problem."""
    try:
        return {engine.config.name: engine for engine in device.engines(problem, n)}
    except CudnnError as error:
        if error.is_unsupported:
            return {}
        raise


# Numbers of engines that cuDNN 9.19 offers on an H200, and not for its description.
ONLY_ON_THE_DEVICE = {"cudnn:70", "cudnn:78"}


@pytest.mark.gpu
def test_the_description_of_the_h200_lists_its_engines(record_property: Callable[[str, object], None]) -> None:
    """In the same order. Workspaces differ, mostly by 131 bytes, and how often and how far is recorded."""
    live, described = current_device(), described_device("h200")
    record_property("device", live.properties_json)
    if "H200" not in live.name:
        pytest.skip(f"{live.name} is no H200, which is the device that is described")
    missing, other_order, differences = set(), [], []
    for problem in recorded_problems():
        for n in MICRO_BATCH_SIZES:
            here, there = engines_by_name(live, problem, n), engines_by_name(described, problem, n)
            missing |= here.keys() ^ there.keys()
            if [name for name in here if name in there] != [name for name in there if name in here]:
                other_order.append((problem, n))
            bytes_of = [(here[name].workspace_bytes, there[name].workspace_bytes) for name in here if name in there]
            differences += [(a - b) / max(a, b) for a, b in bytes_of if a != b]
    record_property("workspaces that differ", len(differences))
    record_property("relative differences of workspaces", sorted(differences)[:: max(len(differences) // 20, 1)])
    assert {name.split()[0] for name in missing} <= ONLY_ON_THE_DEVICE
    assert other_order == []
