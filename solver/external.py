"""External solvers of integer programs, which PuLP runs."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pulp


def programs() -> list[str]:
    """Return the names of the installed external solvers of integer programs, in the order in which to try them.

    CBC comes with PuLP. HiGHS takes up to twice as long for easy problems (about 0.1 s), and far less for hard ones.
    """
    return ["HiGHS", "CBC"] if importlib.util.find_spec("highspy") else ["CBC"]


@contextmanager
def pulp_without_warnings() -> Iterator[Any]:
    """Give the module ``pulp``, imported here because that takes 0.1 s and few need it."""
    import pulp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 warns about names that PuLP 4 changes.
        yield pulp


def run_program(program: pulp.LpProblem, name: str, limit_s: float, **settings: Any) -> None:
    """Solve a program by the named solver. limit_s: seconds, or infinity. Raises what PuLP or the solver raises."""
    with pulp_without_warnings() as pulp:
        settings |= {"msg": False, "threads": 1, "timeLimit": None if math.isinf(limit_s) else limit_s}
        program.solve(pulp.HiGHS(**settings) if name == "HiGHS" else pulp.PULP_CBC_CMD(**settings))
