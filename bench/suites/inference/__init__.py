"""Benchmark of inference against torch: of whole models and module by module, with and without cached filters."""
