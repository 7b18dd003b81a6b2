"""Recipes: TOML files that define an experiment and its acceptance criteria. They are read, run and judged here.

The benchmarks that they run are in ``suites``. The recipes that come with mucudnn are in ``shipped``.
"""
