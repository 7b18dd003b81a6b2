"""Interleaved timings of a table's convolutions: torch's, our best undivided algorithm, and our configurations.

``bench network``, ``bench limits``, ``bench deepbench`` and the recipes of convolutions differ in the configurations
they choose and the tables they print. Tables are made from the samples in a result folder.
"""
