"""Explains what was measured: budgets, headroom, batch sizes, engines.

Nothing is run here but what tuning runs.
"""
