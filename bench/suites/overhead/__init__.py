"""Benchmark of the overhead of a divided call."""
