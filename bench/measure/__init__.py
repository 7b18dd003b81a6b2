"""Measures candidates: which to look at, errors against float64, and whole runs against torch.

Tuning needs all of it. What only a benchmark needs is elsewhere in ``bench``.
"""
