"""Analyses of measurements: budgets, headroom, batch sizes, engines, and comparisons of result folders."""
