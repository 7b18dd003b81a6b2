"""Benchmarks: sources of layers, suites, recipes and reports, built on all other packages."""
