"""Result folders: the time samples of a benchmark, stored together with the environment they were measured in.

This package does not depend on the benchmarks. Each benchmark defines its own subjects, the things it measures.
"""
