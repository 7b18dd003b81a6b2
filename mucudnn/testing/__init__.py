"""Checks an algorithm against the contract that all of them keep, outside pytest too.

``check_algorithm`` is for users. No measuring, no tuning and no algorithm lives here.
"""

from mucudnn.testing.contract import check_algorithm

__all__ = ["check_algorithm"]
