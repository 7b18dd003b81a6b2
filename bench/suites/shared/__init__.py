"""Code shared by benchmarks: interleaved timing of contestants, peak memory, and the parts of a training step.

A contestant is one of the compared implementations. Tuning does not use this package.
"""
