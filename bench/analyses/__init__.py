"""Analyses of measurements: workspace budgets, headroom, batch sizes, engines, and comparisons of result folders."""
