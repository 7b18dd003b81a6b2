"""Why clocks are slow, asked of an NVML that knows one device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from mucudnn.measuring.timing import throttling
from mucudnn.measuring.timing.throttling import current_reasons

UUID = "GPU-1234"


class FakeNvml:
    """Functions of the C interface as they would be found in the library."""

    def __init__(self, function: str, status: int = 0) -> None:
        self.status = status
        setattr(self, function, self._reasons)

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: ctypes._Pointer[ctypes.c_void_p]) -> int:  # noqa: N802
        if uuid != UUID.encode():
            return 6
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = 77
        return 0

    def _reasons(self, device: ctypes.c_void_p, mask: ctypes._Pointer[ctypes.c_ulonglong]) -> int:
        assert device.value == 77
        ctypes.cast(mask, ctypes.POINTER(ctypes.c_ulonglong))[0] = 0x44
        return self.status


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    throttling._device.cache_clear()
    yield
    throttling._device.cache_clear()


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"]
)
def test_the_mask_is_found_under_the_new_name_and_the_old(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(throttling, "_nvml", lambda: FakeNvml(name))
    assert current_reasons(UUID) == 0x44
    assert throttling.throttling(0x44) == "power cap, hardware thermal slowdown"


@pytest.mark.parametrize("nvml", [None, FakeNvml("other"), FakeNvml("nvmlDeviceGetCurrentClocksEventReasons", 3)])
def test_nothing_is_known_where_nvml_is_missing_or_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None
) -> None:
    monkeypatch.setattr(throttling, "_nvml", lambda: nvml)
    assert current_reasons(UUID) == 0
    assert current_reasons("GPU-other") == 0


def test_nothing_is_said_of_an_idle_device_and_of_set_clocks() -> None:
    assert not any(map(throttling.throttling, (0x0, 0x1, 0x2, 0x3, 0x100)))
