"""Winograd convolution (minimal filtering) on torch operators and CUDA; its C++ is in ``kernels/compiled``."""
