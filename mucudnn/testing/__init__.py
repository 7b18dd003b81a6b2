"""Checks of an algorithm against the contract of all algorithms, with or without pytest.

``check_algorithm`` is public.
"""

from mucudnn.testing.contract import check_algorithm

__all__ = ["check_algorithm"]
