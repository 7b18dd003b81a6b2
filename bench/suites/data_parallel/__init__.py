"""Compares steps of data-parallel training with torch's, on the ranks of a process group.

Steps of a single process are in ``training``; steps on many ranks are predicted by ``scaling``.
"""
