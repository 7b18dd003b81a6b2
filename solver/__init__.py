"""Measurements in, configurations out. Pure functions: numpy and pulp, never torch."""

from mucudnn.solver.division import Division, Status, solve_wd
from mucudnn.solver.front import DesirableSets, desirable_sets
from mucudnn.solver.policies import micro_batch_sizes
from mucudnn.solver.reuse import Account, account_wr, solve_wr

__all__ = [
    "Account",
    "DesirableSets",
    "Division",
    "Status",
    "account_wr",
    "desirable_sets",
    "micro_batch_sizes",
    "solve_wd",
    "solve_wr",
]
