"""Measures candidates: which to look at, errors against float64, and whole runs against torch.

Tuning stands on it. Benchmarks, which need more, are in ``mucudnn.bench``.
"""
