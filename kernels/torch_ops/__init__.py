"""Algorithms on torch operators, without compiled code of ours: torch's own convolution, GEMM, direct and FFT."""
