"""Compares errors, ranges and the spread of NaN between algorithms.

No time is measured here.
"""
