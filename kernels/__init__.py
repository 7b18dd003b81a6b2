"""Computes one micro-batch of a convolution: one folder for each family of algorithms.

Nothing here knows a database, a solver or a clock; ``registry`` lists all algorithms.
"""
