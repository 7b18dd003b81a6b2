"""Finds the convolutions of a network, a table, a file or a model, and tunes all of them.

Nothing is timed or printed here.
"""
