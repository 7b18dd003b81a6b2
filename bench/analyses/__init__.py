"""Explains what was measured: budgets, headroom, batch sizes, engines, and what changed between result folders.

Nothing is run here but what tuning runs.
"""
