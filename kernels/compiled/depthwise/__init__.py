"""Computes depthwise convolutions and small groups, by direct sums."""
