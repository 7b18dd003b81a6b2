"""Holds contests: torch against mucudnn, timed in turns, each in a thread of its own, and their peaks of memory.

Several benchmarks share them. Tuning uses none of them.
"""
