"""Compares the results of a network's training step with float64: torch's in each memory format, and mucudnn's.

Errors of single convolutions are in ``numerics``.
"""
