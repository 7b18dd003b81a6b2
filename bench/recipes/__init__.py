"""Recipes: TOML files that define an experiment and its acceptance criteria. This package reads, runs and judges them.

The benchmarks that recipes run are in ``suites``. The recipes that come with mucudnn are in ``shipped``.
"""
