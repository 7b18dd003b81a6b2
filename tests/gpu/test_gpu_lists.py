"""The list of engines that cuDNN gives on a GPU, beside that for a description of it. Not run on a GPU yet."""

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


@pytest.mark.gpu
def test_the_description_of_the_h200_gives_its_workspaces(record_property: Callable[[str, object], None]) -> None:
    """Which engines there are and in what order depends on clocks, which are guessed; what one needs does not."""
    live, described = current_device(), described_device("h200")
    record_property("device", live.properties_json)
    if "H200" not in live.name:
        pytest.skip(f"{live.name} is no H200, which is the device that is described")
    changed, other_names, other_order = [], 0, 0
    for problem in recorded_problems():
        for n in MICRO_BATCH_SIZES:
            here, there = engines_by_name(live, problem, n), engines_by_name(described, problem, n)
            changed += [(problem, n, name) for name in here if name in there and here[name] != there[name]]
            other_names += here.keys() != there.keys()
            other_order += [name for name in here if name in there] != [name for name in there if name in here]
    record_property("lists with other engines", other_names)
    record_property("lists in another order", other_order)
    assert changed == []
