"""Winograd convolution (minimal filtering) by torch operators and CUDA; the C++ part is in ``kernels/compiled``."""
