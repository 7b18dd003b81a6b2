"""Each behaviour is asked of both ways there are to make a call: by the extension, and in Python alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mucudnn.core.problem import Operation
from mucudnn.running import modules, operators
from mucudnn.running.eager import hot_path
from mucudnn.running.eager.hot_path import is_eager_in_python
from mucudnn.running.workspace import release_workspaces


@pytest.fixture(autouse=True, params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The extension, or what runs where it was not built."""
    if request.param == "native" and hot_path.extension is None:
        pytest.skip("the extension was not built")
    if request.param == "python":
        monkeypatch.setattr(hot_path, "extension", None)
        monkeypatch.setattr(operators, "run_known", lambda *_: NotImplemented)
        monkeypatch.setattr(operators, "_compiled", None)
        monkeypatch.setattr(operators, "_values", operators.values)
        for user in (operators, modules):
            monkeypatch.setattr(user, "is_eager", is_eager_in_python)
    yield request.param
    release_workspaces()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """Which registered operators were called, and how often."""
    called: list[Operation] = []

    def noting(operation: Operation, operator: Any) -> Callable[..., Any]:
        return lambda *given: called.append(operation) or operator(*given)

    noted = {o: noting(o, operator) for o, operator in operators.OPERATORS.items()}
    monkeypatch.setattr(operators, "OPERATORS", noted)
    forward = operators.conv2d
    monkeypatch.setattr(operators, "conv2d", noting(Operation.FORWARD, forward))
    return called
