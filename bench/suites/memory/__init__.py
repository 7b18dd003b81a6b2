"""Compares peaks of memory in training steps, torch's and mucudnn's.

Predicted peaks live in ``mucudnn/tracing``.
"""
