"""Interleaved timing of a table's convolutions: torch's, mucudnn's best undivided algorithm, and its configurations.

``bench network``, ``bench limits``, ``bench deepbench`` and the recipes of convolutions differ in the configurations
that they choose and the tables that they print. Tables are made from the time samples in a result folder.
"""
