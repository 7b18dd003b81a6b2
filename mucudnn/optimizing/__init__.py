"""Optimization of whole models: applying tuned choices, confirming them in steps of the model, and reporting them.

``tuning`` makes the choices; ``modules`` has the modules that run them.
"""
