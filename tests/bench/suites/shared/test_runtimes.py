"""Runtimes beside torch: what is missing is named, and outputs are compared."""

from __future__ import annotations

import numpy as np
import pytest

from mucudnn.bench.results.variants import Runtime
from mucudnn.bench.suites.shared import runtimes
from mucudnn.bench.suites.shared.runtimes import relative_difference, require_installed
from mucudnn.core.errors import UnavailableError


def test_outputs_are_compared_together() -> None:
    for outputs, expected, difference in (
        ([[3.0, 4.0]], [[3.0, 4.0]], 0.0),
        ([[3.0], [4.0 + 1e-3]], [[3.0], [4.0]], 2e-4),
        ([[0.0]], [[0.0]], 0.0),
        ([[1.0]], [[0.0]], float("inf")),
        ([[float("nan")]], [[1.0]], float("inf")),
        ([[1.0, 2.0]], [[1.0], [2.0]], float("inf")),
        ([[1.0, 2.0]], [[1.0]], float("inf")),
    ):
        found = relative_difference([*map(np.array, outputs)], [*map(np.array, expected)])
        assert found == pytest.approx(difference)


def test_what_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="onnxscript not installed: pip install openvino onnx onnxscript"):
        require_installed(Runtime.OPENVINO)
    require_installed(Runtime.TORCH_COMPILE)
