"""Holds contests: torch against mucudnn, timed in turns, each in a thread of its own, their peaks of memory,
and where the time of a step goes.

Several benchmarks share them. Tuning uses none of them.
"""
