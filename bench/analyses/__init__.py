"""Explains what was measured: budgets, headroom, batch sizes, engines, the machine's bounds.

Nothing is run here but what tuning runs.
"""
