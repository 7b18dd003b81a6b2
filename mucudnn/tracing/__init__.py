"""Tracing of models: their convolutions, and the memory of a training step.

Nothing is timed, and models are not changed.
"""
