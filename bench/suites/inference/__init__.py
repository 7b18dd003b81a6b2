"""Benchmark of inference against torch, for whole models and single modules, with and without cached filters."""
