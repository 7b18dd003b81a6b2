"""Result folders: the samples of a benchmark, beside the environment in which they were measured.

This package is independent of the benchmarks, each of which defines its subjects, the things that it measures.
"""
