"""Compares the numbers that algorithms compute: errors, ranges, and how far NaN spreads.

No time is measured here.
"""
