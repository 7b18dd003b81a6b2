"""Algorithms that use only torch operators: torch's own convolution, GEMM (matrix products), direct, and FFT."""
