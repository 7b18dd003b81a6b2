"""Runs everything that needs a GPU in one command, and records what its cuDNN offers.

The tests and benchmarks that it runs live elsewhere.
"""
