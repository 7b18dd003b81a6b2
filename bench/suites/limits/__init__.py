"""Compares micro-batches with whole mini-batches under equal workspace limits.

The paper does so in its section on workspace reuse.
"""
