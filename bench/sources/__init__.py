"""Finds the convolutions of a network, a table, a file or a model, and tunes such a table.

Nothing is timed or printed here.
"""
