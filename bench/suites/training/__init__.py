"""Benchmark of whole training steps against torch; single convolutions are in ``convolutions``."""
