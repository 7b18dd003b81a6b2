"""Contests that several benchmarks share: contestants timed in turns, peak memory, and the parts of a step's time.

Tuning does not use this package.
"""
