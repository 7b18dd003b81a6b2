"""Benchmark of data-parallel training: mucudnn's steps against torch's, on the ranks of a process group.

The package ``training`` has steps of a single process; ``scaling`` predicts steps on many ranks.
"""
