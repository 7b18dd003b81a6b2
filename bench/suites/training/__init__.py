"""Compares whole training steps with torch, and holds the demo.

Single convolutions are in ``network``.
"""
