"""The C++ code, one folder for each algorithm, and the algorithms written entirely in it.

``setup.py`` builds it for each instruction set; ``library`` loads the best build.
"""
