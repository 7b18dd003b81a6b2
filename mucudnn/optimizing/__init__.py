"""Optimization of whole models: applies the tuned choices, confirms them in steps of the model, and reports them.

``tuning`` makes the choices; ``modules`` has the modules that run them.
"""
