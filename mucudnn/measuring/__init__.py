"""Measuring for tuning: candidate algorithms, their errors against float64, their times, and whole calls against torch.

Benchmarks are in ``mucudnn.bench``.
"""
