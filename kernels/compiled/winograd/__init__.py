"""Holds the C++ of Winograd convolution; its Python is in ``kernels/winograd``."""
