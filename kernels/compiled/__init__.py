"""The C++ code, in a folder for each convolution algorithm, and the Python classes of the algorithms written in C++.

``setup.py`` builds the C++ code for each instruction set; ``library`` loads the best build for this processor.
"""
