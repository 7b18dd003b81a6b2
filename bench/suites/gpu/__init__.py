"""Runs all that needs a GPU in one command, and records what its library offers.

The tests and benchmarks that it runs live elsewhere.
"""
