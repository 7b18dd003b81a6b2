"""Compares the peak of memory of training steps, torch and mucudnn.

Predicted peaks live in ``mucudnn/tracing``.
"""
