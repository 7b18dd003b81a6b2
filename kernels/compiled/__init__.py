"""The C++ code, one folder for each convolution algorithm, and the Python classes of algorithms entirely in C++.

``setup.py`` builds the C++ code for each instruction set; ``library`` loads the best build for this processor.
"""
