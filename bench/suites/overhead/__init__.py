"""Benchmark of the overhead of a convolution call that is divided into micro-batches."""
