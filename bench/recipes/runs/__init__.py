"""Runs each benchmark that recipes name: one file a benchmark, with a function ``run``."""
