"""Reads recipes (TOML files that say what is measured and what must come out), runs them, and judges the results.

What runs and measures is in ``suites``. The recipes that come with mucudnn lie in ``shipped``.
"""
