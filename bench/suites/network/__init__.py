"""Compares all convolutions of a network with torch, in both memory formats.

Whole training steps are in ``training``.
"""
