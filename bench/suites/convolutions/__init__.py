"""Times the convolutions of a table, interleaved: torch's, our best undivided algorithm, and our configurations.

``bench network``, ``bench limits``, ``bench deepbench`` and the recipes of convolutions differ in what is chosen and in
what their tables tell. All samples are in a result folder; what is told is read from there.
"""
