"""Tracing of models: finds their convolutions, and the memory of a training step.

The tracing times nothing and does not change the models.
"""
