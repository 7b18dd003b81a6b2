"""Benchmark of inference against torch, of whole models and of single modules, with and without cached filters."""
