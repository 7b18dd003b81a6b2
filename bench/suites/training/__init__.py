"""Benchmark of whole training steps against torch; the benchmark of single convolutions is in ``convolutions``."""
