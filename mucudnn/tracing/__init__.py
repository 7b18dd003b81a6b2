"""Tracing of models for their convolutions and for the memory of a training step.

Tracing measures no times and does not change the models.
"""
