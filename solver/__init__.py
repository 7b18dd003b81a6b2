"""Measurements in, configurations out. Pure functions: numpy and pulp, never torch."""

from mucudnn.solver.account import Status
from mucudnn.solver.curve import BudgetCurve, Marginal, marginal, next_faster, time_curve
from mucudnn.solver.division import Division, solve_wd
from mucudnn.solver.front import DesirableSets, desirable_sets
from mucudnn.solver.policies import micro_batch_sizes
from mucudnn.solver.reuse import Account, account_wr, solve_wr

__all__ = [
    "Account",
    "BudgetCurve",
    "DesirableSets",
    "Division",
    "Marginal",
    "Status",
    "account_wr",
    "desirable_sets",
    "marginal",
    "micro_batch_sizes",
    "next_faster",
    "solve_wd",
    "solve_wr",
    "time_curve",
]
