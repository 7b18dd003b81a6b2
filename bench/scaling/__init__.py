"""Predictions of data-parallel training from measurements on one device, and batches divided over unequal devices.

The models of all-reduce and of gradient buckets are in the package ``solver``.
"""
