"""Holds the loop nest: direct sums without any buffer."""
