"""Predictions of data-parallel training from measurements on one device, and batches divided over unequal devices.

The package ``solver`` has the models of all-reduce and of gradient buckets.
"""
