"""Errors against float64: of one layer's algorithms, and of a network's training step.

The metrics are those of level 0 of Deep500 (Ben-Nun et al., 2019, "A modular benchmarking infrastructure for
high-performance and reproducible deep learning").
"""
