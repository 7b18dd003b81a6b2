"""Holds the modules that stand in for torch's convolutions, and turns torch's into them.

What they compute with is in ``running``. A pickled model needs both.
"""
