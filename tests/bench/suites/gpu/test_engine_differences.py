"""What a described device offers beside the real one: on recorded lists, and on a GPU where there is an H200."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.cudnn.recording import RecordedDevice, recorded_device, recorded_offers

from mucudnn.bench.suites.gpu.device_record import properties_of
from mucudnn.bench.suites.gpu.engine_differences import differences
from mucudnn.bench.suites.gpu.record_engines import MICRO_BATCH_SIZES
from mucudnn.kernels.cudnn.device import current_device, described_device
from mucudnn.kernels.cudnn.engines import Engine
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.words.problem import ConvProblem

PROBLEM = next(iter(recorded_offers()))


def changed(engines: list[Engine]) -> RecordedDevice:
    device = recorded_device()
    return replace(device, offers={**device.offers, PROBLEM: {**device.offers[PROBLEM], 4: engines}})


def difference(engines: list[Engine]) -> dict[str, object]:
    (found,) = differences(changed(engines), recorded_device(), [PROBLEM])
    return {name: found[name] for name in ("micro_batch_size", "only_live", "only_described", "changed", "same_order")}


def test_equal_lists_do_not_differ() -> None:
    assert differences(recorded_device(), recorded_device(), recorded_offers()) == []


def test_every_kind_of_difference_is_told() -> None:
    engines = recorded_offers()[PROBLEM][4]
    first, second, *others = engines
    names = [engine.config.name for engine in engines]
    equal = {"micro_batch_size": 4, "only_live": [], "only_described": [], "changed": [], "same_order": True}
    assert difference([second, first, *others]) == equal | {"same_order": False}
    assert difference([second, *others]) == equal | {"only_described": names[:1]}
    larger = replace(first, workspace_bytes=first.workspace_bytes + 1)
    assert difference([larger, second, *others]) == equal | {"changed": names[:1]}
    (found,) = differences(recorded_device(), changed(others), [PROBLEM])
    assert found["only_live"] == names[:2]


def test_what_cudnn_cannot_compute_is_an_empty_list() -> None:
    class Refusing:
        def engines(self, problem: ConvProblem, n: int) -> list[Engine]:
            raise CudnnError("list", 3000, "CUDNN_STATUS_NOT_SUPPORTED", "")

    assert differences(Refusing(), Refusing(), [PROBLEM]) == []
    found = differences(Refusing(), recorded_device(), [PROBLEM])
    assert [record["micro_batch_size"] for record in found] == list(MICRO_BATCH_SIZES)


def test_a_device_that_cudnn_cannot_describe_is_recorded_with_the_reason() -> None:
    class Undescribed:
        @property
        def properties_json(self) -> str:
            raise CudnnError("make DEVICEPROP", 2000, "CUDNN_STATUS_BAD_PARAM", "its words")

    assert properties_of(SimpleNamespace(properties_json='{"deviceName": "Here"}')) == {"deviceName": "Here"}
    assert "its words" in properties_of(Undescribed())["unknown"]


@pytest.mark.gpu
def test_the_description_of_the_h200_gives_its_workspaces() -> None:
    """Which engines there are and in what order depends on clocks, which are guessed; what one needs does not."""
    live = current_device()
    if "H200" not in live.name:
        pytest.skip(f"{live.name} is no H200, which is the device that is described")
    found = differences(live, described_device("h200"), recorded_offers())
    assert [record for record in found if record["changed"]] == []
