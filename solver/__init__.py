"""Measurements in, configurations out. Pure functions: numpy and pulp, never torch."""

from mucudnn.solver.front import DesirableSets, desirable_sets
from mucudnn.solver.policies import micro_batch_sizes
from mucudnn.solver.reuse import Account, account_wr, solve_wr

__all__ = ["Account", "DesirableSets", "account_wr", "desirable_sets", "micro_batch_sizes", "solve_wr"]
