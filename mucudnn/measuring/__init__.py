"""Measurements for tuning: errors and times of candidate algorithms, and comparisons of whole calls with torch.

Benchmarks are in ``mucudnn.bench``.
"""
