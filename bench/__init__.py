"""Benchmarks: layer sources, suites, recipes and reports, on top of everything else."""
