"""Code of benchmarks: interleaved timing of contestants, peak memory, calls of a layer, and the parts of a step.

A contestant is one of the compared implementations. Tuning does not use this package.
"""
