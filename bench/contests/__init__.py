"""Holds contests: torch against mucudnn, timed in turns, each in a thread of its own.

Peaks of memory, and the parts of a step's time, are here, too. Several benchmarks share them. Tuning uses none of them.
"""
