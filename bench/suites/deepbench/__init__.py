"""Measures DeepBench's convolutions: torch, our best undivided algorithm, and our configuration under each limit.

What it measures is in a result folder; what is told of it is read from there.
"""
