"""Holds the C++, a folder for each algorithm, and the algorithms that are wholly written in it.

``setup.py`` builds it once for each instruction set; ``library`` loads the best one.
"""
