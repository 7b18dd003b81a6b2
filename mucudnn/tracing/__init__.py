"""Watches models: their convolutions, and the memory of a training step.

Nothing is timed or changed.
"""
