"""Measuring for tuning: candidates, their errors against float64, their times, and whole runs against torch.

Benchmarks are in ``mucudnn.bench``.
"""
