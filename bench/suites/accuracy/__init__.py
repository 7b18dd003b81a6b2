"""Errors against float64: of operators, of modules, on unusual images, of a training step, and of a training run.

Operators and modules are measured by the metrics of level 0 of Deep500 (Ben-Nun et al., 2019, "A modular benchmarking
infrastructure for high-performance and reproducible deep learning"). Every benchmark writes rows into a result folder,
from which tables are made.
"""
