"""Winograd convolution (minimal filtering) with torch operators and CUDA; the C++ part is in ``kernels/compiled``."""
