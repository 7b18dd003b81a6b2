"""Holds one folder for each benchmark.

What several of them share is in ``contests`` and ``report``.
"""
