"""Contests that several benchmarks share: they time contestants in turns, measure peak memory, and split steps' times.

A contestant is one of the compared implementations. Tuning does not use this package.
"""
