"""Predictions of data-parallel training from training steps measured on one device.

The models of all-reduce and of gradient buckets are in the package ``solver``.
"""
