"""Makes tuning choose something of ours, whether it is faster than PyTorch's own or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mucudnn.core.records import Measurement, MicroConfig
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.tuning import choose as choosing


def choose_always_ours(patch: pytest.MonkeyPatch) -> None:
    """For tests whose results are compared: on a GPU PyTorch's own is often the fastest."""
    account: Callable[..., Any] = choosing.account_wr
    near: Callable[..., Any] = choosing.contenders_near

    def account_of_ours(measurements: Sequence[Measurement], batch_size: int, *more: Any, **named: Any) -> Any:
        return account(_ours(measurements, batch_size) or measurements, batch_size, *more, **named)

    def near_of_ours(fastest: Any, measurements: Sequence[Measurement], batch_size: int, *more: Any) -> Any:
        return near(fastest, _ours(measurements, batch_size) or measurements, batch_size, *more)

    patch.setattr(choosing, "account_wr", account_of_ours)
    patch.setattr(choosing, "contenders_near", near_of_ours)
    patch.setattr(choosing, "is_gain", lambda run: True)


def _ours(measurements: Sequence[Measurement], batch_size: int) -> list[Measurement]:
    return [m for m in measurements if m.micro_config != MicroConfig(TORCHS_OWN, batch_size)]
