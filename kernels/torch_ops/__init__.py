"""Computes convolutions by torch's operators: its own convolution, GEMM, direct, FFT.

They run wherever torch runs, and need nothing compiled.
"""
