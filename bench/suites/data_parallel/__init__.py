"""Benchmark of data-parallel training: mucudnn's steps against torch's, on the ranks of a process group.

Steps of a single process are in ``training``; ``scaling`` predicts steps on many ranks.
"""
